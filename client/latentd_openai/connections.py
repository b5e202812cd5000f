"""How many connections may be open at a time: no more than there are files for."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

BACKLOG: Final = 128
"""Connections that the event loop accepts in one turn."""
RESERVE: Final = 64 + 5 * BACKLOG
"""Files for all else (the daemon, the log, a tokenizer), and for what is accepted in the turns that
the loop takes until one of them is ended."""
MOST: Final = 65_536
"""Files that are asked for where the system would allow any number."""


class BoundedProtocol(H11Protocol):
    """HTTP on a connection, which is ended at once where `room_for` are open. (Python's event loop
    would write a traceback for each one that it has no file for, as fast as it can.)"""

    room_for = 1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new one, perhaps one too many."""
        super().connection_made(transport)
        if len(self.connections) > self.room_for:
            transport.abort()


def make_room() -> None:
    """Ask for as many files as this process may have, and let as many connections be open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    with suppress(OSError, ValueError):  # then the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    BoundedProtocol.room_for = max(1, files - RESERVE)
