"""What the server needs of a socket that talks to many peers, whatever moves its bytes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container

    from latentd.credentials import Credentials

Frames: TypeAlias = "list[bytes | memoryview]"
Message: TypeAlias = tuple[bytes, list[bytes], int]
"""A peer's name, the frames of its message, and their true number (those beyond a limit are not
kept)."""

SEND_QUEUE = 128
"""Replies that wait for a peer before it is full."""
SPARE_S = 0.005
"""See Router.spare_s, until its owner knows better."""


class Sent(enum.Enum):
    """What became of a message."""

    YES = enum.auto()
    FULL = enum.auto()
    DEAD = enum.auto()


class Router(Protocol):
    """A bound socket. It belongs to one thread. `spare_s`: about how long a turn may take beside
    the messages of those who are connected."""

    spare_s: float

    def receive(self) -> Message | None:
        """The next message that is there, or None."""

    def rest(self, peer: bytes, seconds: float) -> None:
        """Receive nothing of a peer for so long, or until `sleep`, as far as that can be done."""

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """Send a message, or nothing of it, without waiting. FULL is only for routers that cannot
        keep a peer from asking more."""

    def has_room(self, peer: bytes) -> bool:
        """Whether a stream may send to a peer; replies need not ask."""

    def who(self, peer: bytes) -> Credentials:
        """Who is on the other end, as far as that can be told."""

    def is_alone(self) -> bool:
        """Whether nobody is connected, as far as that can be told; on any thread."""

    def look(self) -> bool:
        """Whether `receive` may find something."""

    def watch(self, wakee: socket.socket) -> None:
        """End a `sleep` when `wakee` has something to read too, which is then read."""

    def sleep(self, timeout_ms: int) -> None:
        """Wait for something to happen."""

    def tick(self, now: float, in_use: Callable[[], Container[bytes]]) -> None:
        """Look after what needs a look now and then; `now` is monotonic. The peers of `in_use` do
        not have to give way when there are too many."""

    def close(self, linger_ms: int) -> None:
        """Close it; what was sent has `linger_ms` to leave."""
