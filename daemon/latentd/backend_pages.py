"""Pages between the slab and the host: copies on the engine's stream, through pinned memory.

The staging memory has two halves that take turns: while the device copies one of them the host
fills the other. A copy stands in the stream in order with the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

HALF_BYTES: Final = 8 << 20
"""Of a half of the staging memory, unless one page is larger."""


class _Half:
    """A half of the staging memory; `copied` is behind its last copy."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.memory = torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=True)
        self.array = self.memory.numpy()
        self.copied = driver.Event()


class PageCopies:
    """Reads and writes pages of one slab."""

    def __init__(self, slab: Tensor, stream: int) -> None:
        self._slab = slab
        self._stream = stream
        self._page_bytes = slab[0].nbytes
        self._pages = max(1, HALF_BYTES // self._page_bytes)
        self._halves = [_Half(self._pages, self._page_bytes) for _ in range(2)]

    def read(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of pages, [pages, page_bytes]. Waits for the stream. Raises DriverError."""
        data = np.empty((len(pages), self._page_bytes), np.uint8)
        started: list[tuple[_Half, slice]] = []
        for half, part in self._parts(len(pages)):
            if len(started) == 2:
                self._take(data, *started.pop(0))
            for row, page in enumerate(pages[part]):
                driver.download(
                    half.array[row].ctypes.data, self._at(page), self._page_bytes, self._stream
                )
            half.copied.record(self._stream)
            started.append((half, part))
        for half, part in started:
            self._take(data, half, part)
        return data

    def write(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Start to fill pages with `data` [pages, page_bytes], which has been read on return.
        Raises DriverError."""
        for half, part in self._parts(len(pages)):
            half.copied.synchronize()
            rows = data[part]
            half.array[: len(rows)] = rows
            for row, page in enumerate(pages[part]):
                driver.upload(
                    self._at(page), half.array[row].ctypes.data, self._page_bytes, self._stream
                )
            half.copied.record(self._stream)

    def _parts(self, count: int) -> Iterator[tuple[_Half, slice]]:
        """The halves in turn, and what of `count` pages goes through each."""
        for first in range(0, count, self._pages):
            self._halves.reverse()
            yield self._halves[0], slice(first, min(first + self._pages, count))

    @staticmethod
    def _take(data: NDArray[np.uint8], half: _Half, part: slice) -> None:
        """Wait for a half and take what the device has put there."""
        half.copied.synchronize()
        data[part] = half.array[: part.stop - part.start]

    def _at(self, page: int) -> int:
        return self._slab.data_ptr() + page * self._page_bytes

    def close(self) -> None:
        """Free the events, when nothing is in the stream."""
        for half in self._halves:
            half.copied.close()
