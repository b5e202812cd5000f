"""Tensors from files to their places on the device: read, hashed and copied chunk by chunk."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from latentd.shards import Entry, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK_BYTES = 32 * 2**20
"""Most bytes read, hashed and copied at a time; part of the content hash."""
READERS = 4
"""Threads that read and hash (sha256 runs at 1-2 GB/s a core and lets go of the GIL)."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes that can be read, by the format's names."""


@dataclass(frozen=True)
class Job:
    """A tensor of a file and the view that it fills, element for element in order."""

    entry: Entry
    view: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """A run of an entry's bytes and the part of its place that it fills."""

    entry: Entry
    offset: int
    num_bytes: int
    view: torch.Tensor


def _chunks(jobs: Sequence[Job]) -> Iterator[_Chunk]:
    """All chunks in the order of the files, cut along the first dimension of the view."""
    for job in sorted(jobs, key=lambda job: (job.entry.file, job.entry.begin)):
        entry, view = job.entry, job.view
        row_bytes = entry.num_bytes // view.shape[0]
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, view.shape[0], step):
            part = view[first : first + step]
            yield _Chunk(entry, first * row_bytes, part.shape[0] * row_bytes, part)


def _read(chunk: _Chunk, buffer: torch.Tensor) -> bytes:
    """Read one chunk to the front of `buffer` and hash it; runs on a reader thread."""
    view = buffer.numpy().data[: chunk.num_bytes]
    read_bytes(chunk.entry, chunk.offset, view)
    return hashlib.sha256(view).digest()


def fill(
    jobs: Sequence[Job], device: torch.device, progress: Callable[[int, int], None]
) -> dict[str, list[bytes]]:
    """Stream every tensor to its place; returns the digests of each tensor's chunks, in order.

    Readers run ahead by the number of buffers; copies to the device stay on the caller's thread.
    """
    chunks = list(_chunks(jobs))
    digests: dict[str, list[bytes]] = {job.entry.name: [] for job in jobs}
    total, done = sum(chunk.num_bytes for chunk in chunks), 0
    largest = max(chunk.num_bytes for chunk in chunks)
    readers = min(READERS, os.cpu_count() or 1)
    pinned = device.type == "cuda"
    free = [
        torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
        for _ in range(min(2 * readers, len(chunks)))
    ]
    running: deque[tuple[_Chunk, torch.Tensor, Future[bytes]]] = deque()
    with ThreadPoolExecutor(readers, "latentd-load") as pool:
        waiting = deque(chunks)
        while waiting or running:
            while waiting and free:
                chunk, buffer = waiting.popleft(), free.pop()
                running.append((chunk, buffer, pool.submit(_read, chunk, buffer)))
            chunk, buffer, future = running.popleft()
            digests[chunk.entry.name].append(future.result())
            values = buffer[: chunk.num_bytes].view(DTYPES[chunk.entry.dtype])
            chunk.view.copy_(values.view(chunk.view.shape))  # returns when the buffer is free
            free.append(buffer)
            done += chunk.num_bytes
            progress(done, total)
    return digests
