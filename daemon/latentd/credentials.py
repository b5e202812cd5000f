"""Who is on the other end of a connection, as the system or the handshake tells it."""

from __future__ import annotations

import contextlib
import socket
import struct
from array import array
from dataclasses import dataclass
from typing import Final

_UCRED: Final = struct.Struct("iII")
"""Process, user and group of SO_PEERCRED (unix(7))."""
SO_PEERGROUPS: Final = 59
"""The groups beside that one, of Linux 4.13 (asm-generic/socket.h); Python has no name for it."""
GROUP_BYTES: Final = 1024
"""Room for 256 groups, the most that Python asks for."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A peer. On ipc the system tells `user`, `group`, `process` and `groups` (all of the peer's,
    when it connected, if they are 256 at most); with CURVE there are an `address` and the peer's
    public `key`; over plain tcp nothing is known."""

    user: int | None = None
    group: int | None = None
    process: int | None = None
    groups: frozenset[int] = frozenset()
    key: str = ""
    address: str = ""

    @property
    def owner(self) -> str:
        """Whose sessions the peer may use, beside knowing their tokens; the same for all of whom
        nothing is known."""
        return f"key {self.key}" if self.key else "" if self.user is None else f"user {self.user}"

    def __str__(self) -> str:
        return self.owner or "an unknown user"


UNKNOWN: Final = Credentials()


def of_socket(sock: socket.socket) -> Credentials:
    """Those of a socket's other end: over tcp the system knows nothing of it, though it answers."""
    if sock.family != socket.AF_UNIX:
        return UNKNOWN
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    process, user, group = _UCRED.unpack(told)
    groups = array("I")
    with contextlib.suppress(OSError):  # there are more of them, or an older system: the one then
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUP_BYTES))
    return Credentials(user, group, process, frozenset((group, *groups)))
