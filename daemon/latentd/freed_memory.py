"""What the C library does with large blocks of memory that were freed."""

from __future__ import annotations

import ctypes
from typing import Final

HEAP_BLOCK_BYTES: Final = 32 << 20
"""Blocks up to this size, the most that glibc allows, come from the heap."""
KEPT_BYTES: Final = 64 << 20
"""Free memory at the end of the heap beyond this goes back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Have large blocks freed kept for the next ones. Else the system maps and zeroes the pages of
    each long message anew, which costs several times what its copies do. Only glibc can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
