"""Sockets that the service manager has bound for the daemon (sd_listen_fds(3)).

Whoever connects before the daemon is ready, or while it is restarted, waits for it. The path is the
manager's: it is there before the daemon and stays behind it.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from latentd.endpoint import EndpointError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

FIRST_FD: Final = 3
"""SD_LISTEN_FDS_START."""


def take(environ: MutableMapping[str, str] = os.environ) -> dict[str, socket.socket]:
    """The listening sockets by endpoint. The variables go: they are for this process only. Raises
    EndpointError for a socket that the daemon cannot serve."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    return dict(_look_at(fd) for fd in range(FIRST_FD, FIRST_FD + int(count)))


def _look_at(fd: int) -> tuple[str, socket.socket]:
    """A handed over socket and its endpoint."""
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        name = sock.getsockname()
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise EndpointError(f"descriptor {fd} of the service manager: {error.strerror}") from None
    is_stream = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    if not is_stream or not listens or not isinstance(name, str) or not name.startswith("/"):
        raise EndpointError(
            f"the service manager hands over {name!r}: latentd takes unix sockets with a path, as "
            "in ListenStream=/run/latentd/latentd.sock of latentd.socket"
        )
    return f"ipc://{name}", sock
