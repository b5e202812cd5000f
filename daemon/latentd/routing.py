"""What the server needs of a socket that talks to many peers, whatever moves its bytes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import socket

Frames: TypeAlias = "list[bytes | memoryview]"
Message: TypeAlias = tuple[bytes, list[bytes], int]
"""A peer's name, the frames of its message, and their true number (those beyond a limit are not
kept)."""

SEND_QUEUE = 128
"""Replies that a peer's queue holds before its streams park."""


class Sent(enum.Enum):
    """What became of a message."""

    YES = enum.auto()
    FULL = enum.auto()
    DEAD = enum.auto()


class Router(Protocol):
    """A bound socket. It belongs to one thread."""

    def receive(self) -> Message | None:
        """The next message that is there, or None."""

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """Send a message, or nothing of it, without waiting."""

    def look(self) -> bool:
        """Whether `receive` may find something."""

    def watch(self, wakee: socket.socket) -> None:
        """End a `sleep` when `wakee` has something to read too, which is then read."""

    def sleep(self, timeout_ms: int) -> None:
        """Wait for something to happen."""

    def tick(self, now: float) -> None:
        """Look after what needs a look now and then; `now` is monotonic."""

    def close(self, linger_ms: int) -> None:
        """Close it; what was sent has `linger_ms` to leave."""
