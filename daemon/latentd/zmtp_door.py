"""Where peers come in: the listening socket, and how many of them a process can have."""

from __future__ import annotations

import errno
import resource
import select
import time
from typing import TYPE_CHECKING, Final

from latentd.rarely import Rarely

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

ACCEPTS: Final = 16
"""Connections taken in one turn at most."""
RESERVE: Final = 64
"""Descriptors that peers leave to the rest of the process."""
SHARE: Final = 2
"""The data and the control socket may have one part each of the others: a client has both."""


class Door:
    """A listening socket, which is ours, in an epoll. It shuts when there is no descriptor for
    another peer."""

    def __init__(self, epoll: select.epoll, listening: socket.socket) -> None:
        self._epoll = epoll
        self._socket = listening
        self._crowd = Rarely()
        self.is_shut = False
        listening.setblocking(False)
        epoll.register(listening, select.EPOLLIN)

    def fileno(self) -> int:
        """The listening socket's descriptor."""
        return self._socket.fileno()

    def take(self, num_peers: int, spare_s: float) -> Iterator[socket.socket]:
        """Connections that wait, not blocking, until the time is over; those that are left are
        there in the next turn."""
        until = time.monotonic() + spare_s
        most = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE) // SHARE
        for num_taken in range(ACCEPTS):
            if num_peers + num_taken >= most:
                self._shut(f"{most} are connected, as many as the limit of open files allows")
                return
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._shut(str(error))
                return
            sock.setblocking(False)
            yield sock
            if time.monotonic() > until:
                return

    def _shut(self, why: str) -> None:
        self.is_shut = True
        self._epoll.modify(self._socket, 0)
        self._crowd.warn("clients have to wait: %s", why)

    def pause(self) -> None:
        """Take no connection until `resume`."""
        if not self.is_shut:
            self._epoll.modify(self._socket, 0)

    def resume(self) -> None:
        """Take connections again, unless it is shut."""
        if not self.is_shut:
            self._epoll.modify(self._socket, select.EPOLLIN)

    def open(self) -> None:
        """Take connections again."""
        self.is_shut = False
        self._epoll.modify(self._socket, select.EPOLLIN)

    def close(self) -> None:
        """Close the listening socket."""
        self._socket.close()
