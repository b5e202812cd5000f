"""Frames of fixed bytes with numbers in fixed places, recognised and read as a whole."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

_TOP_BITS: Final = {"I": b"\0\0\0\0", "i": b"\x80\0\0\0", "Q": bytes(8), "q": b"\x80" + bytes(7),
                    "d": bytes(8)}  # fmt: skip


class Layout:
    """One kind of frame. All fixed bits are compared at once, as those of one long number: the
    bytes between the values, and the top bits of values that may not be so large."""

    def __init__(self, *parts: bytes | str) -> None:
        """Each part is fixed bytes, or a value by its code of `struct`: I, Q, d; i and q for what
        has its top bit clear; "<n>s" for ASCII text."""
        form, fixed, mask = ">", b"", b""
        for part in parts:
            if isinstance(part, bytes):
                form += f"{len(part)}x"
                fixed += part
                mask += b"\xff" * len(part)
            else:
                form += part
                bits = _TOP_BITS.get(part) or b"\x80" * int(part[:-1])
                fixed += bytes(len(bits))
                mask += bits
        self.size = len(mask)
        self._unpack = Struct(form).unpack
        self._fixed = int.from_bytes(fixed, "big")
        self._mask = int.from_bytes(mask, "big")

    def read(self, frame: bytes) -> tuple[Any, ...] | None:
        """The values in a frame of this size; None when it is none of this kind."""
        if int.from_bytes(frame, "big") & self._mask != self._fixed:
            return None
        return self._unpack(frame)
