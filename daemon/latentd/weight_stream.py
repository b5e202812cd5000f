"""Tensors from files to their places on the device: hashed and copied chunk by chunk."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from latentd.shards import Entry, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

CHUNK_BYTES = 32 * 2**20
"""Most bytes hashed and copied at a time; part of the content hash."""
HASHERS = 4
"""Threads that hash (sha256 runs at 1-2 GB/s a core and lets go of the GIL)."""
CHUNKS_AHEAD = 2 * HASHERS
"""Most chunks that are read from the disk, by hashing them, before they are copied."""


@dataclass(frozen=True)
class Job:
    """A tensor of a file and the view that it fills, element for element in order."""

    entry: Entry
    view: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """A run of a tensor's values, in its file's memory map, and the place that it fills."""

    name: str
    values: torch.Tensor
    place: torch.Tensor


def fill(
    jobs: Sequence[Job], device: torch.device, progress: Callable[[int, int], None]
) -> dict[str, list[bytes]]:
    """Stream every tensor to its place; returns the digests of each tensor's chunks, in order.

    Hashing runs ahead on threads; copies to the device stay on the caller's thread.
    """
    digests: dict[str, list[bytes]] = {job.entry.name: [] for job in jobs}
    total, done = sum(job.entry.num_bytes for job in jobs), 0
    for chunk, digest in _hashed(_chunks(jobs)):
        digests[chunk.name].append(digest)
        chunk.place.copy_(chunk.values)
        done += chunk.values.nbytes
        progress(done, total)
    return digests


def _chunks(jobs: Sequence[Job]) -> Iterator[_Chunk]:
    """All chunks, file by file, cut along the first dimension of the view."""

    def file_of(job: Job) -> Path:
        return job.entry.file

    for file, group in groupby(sorted(jobs, key=file_of), key=file_of):
        views = {job.entry.name: job.view for job in group}
        for name, values in map_tensors(file, views).items():
            view = views[name]
            values = values.view(view.shape)
            step = max(1, CHUNK_BYTES // values[0].nbytes)
            for part, place in zip(torch.split(values, step), torch.split(view, step), strict=True):
                yield _Chunk(name, part, place)


def _hashed(chunks: Iterable[_Chunk]) -> Iterator[tuple[_Chunk, bytes]]:
    """Every chunk with its digest, in order; CHUNKS_AHEAD of them are in work at a time."""
    running: deque[tuple[_Chunk, Future[bytes]]] = deque()
    with ThreadPoolExecutor(HASHERS, "latentd-load") as pool:
        for chunk in chunks:
            running.append((chunk, pool.submit(_digest, chunk.values)))
            if len(running) > CHUNKS_AHEAD:
                chunk, future = running.popleft()
                yield chunk, future.result()
        for chunk, future in running:
            yield chunk, future.result()


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().data).digest()
