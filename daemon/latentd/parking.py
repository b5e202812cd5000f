"""Replies that wait for a peer which does not read, within bounds. Only libzmq's peers need that:
ours are not read from any more instead."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentd.routing import Frames

MAX_PARKED = 64
"""Replies kept for a peer, beside the socket's own queue; more are dropped and counted (a repeated
request gets its stored reply)."""
MAX_PARKED_BYTES = 16 << 20
"""And in bytes; one reply may be larger."""


class Parked:
    """The replies of one peer, in their order."""

    __slots__ = ("_replies", "_size")

    def __init__(self) -> None:
        self._replies: deque[Frames] = deque()
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._replies)

    def add(self, frames: Frames) -> bool:
        """Keep a reply; False where there is no place for it."""
        size = size_of(frames)
        if self._replies and (
            len(self._replies) >= MAX_PARKED or self._size + size > MAX_PARKED_BYTES
        ):
            return False
        self._replies.append(frames)
        self._size += size
        return True

    @property
    def first(self) -> Frames:
        """The oldest one."""
        return self._replies[0]

    def drop_first(self) -> None:
        """It has gone."""
        self._size -= size_of(self._replies.popleft())


def size_of(frames: Frames) -> int:
    """Bytes of a message."""
    return sum(memoryview(frame).nbytes for frame in frames)
