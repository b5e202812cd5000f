"""Listening at an endpoint safely: path length, directory, permissions, and a lock against a second
daemon (the system would let it steal the path). It knows nothing of messages."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
import stat
from typing import Final

from latentd import tcp_address

BACKLOG: Final = 1024
"""Connections that the system keeps until they are taken. Over tcp one that finds no place there
comes again after a second."""
MAX_PATH_BYTES = 107
"""sun_path of a unix socket holds 108 bytes, the last is 0 (unix(7))."""
REMEDY = "choose a place of your own with --endpoint or LATENTD_ENDPOINT"
"""What helps a user who has no rights where the daemon's socket usually lies."""
PORT_REMEDY = (
    "choose another address or port with --endpoint or LATENTD_ENDPOINT; the control socket is at "
    "the next port, or where --control-endpoint says"
)
"""What helps where a port is taken, of which the user may never have heard."""

log = logging.getLogger(__name__)


class EndpointError(Exception):
    """An endpoint that cannot be served; the text names it, the reason and what to do."""


class Binding:
    """One endpoint that listens, locked until `release`. `endpoint` is where clients connect, and
    `socket` listens there: it is the caller's."""

    def __init__(
        self, endpoint: str, handed_over: socket.socket | None = None, is_guarded: bool = False
    ) -> None:
        """Listen. The path of a socket that is `handed_over` is only locked: the service manager
        has bound it and takes it away. tcp that `is_guarded` (CURVE) may be reached from other
        machines. Raises EndpointError."""
        self.endpoint = endpoint
        self._path: str | None = None
        self._lock = -1
        try:
            check_form(endpoint, is_guarded)
            if endpoint.startswith("ipc://"):
                self.socket = self._take_path(endpoint[6:], handed_over)
            else:
                self.socket = _take_port(*tcp_address.parse(endpoint, is_guarded))
                self.endpoint = tcp_address.endpoint_of(self.socket)
        except OSError as error:
            self.release()
            remedy = REMEDY if endpoint.startswith("ipc://") else PORT_REMEDY
            raise EndpointError(f"cannot bind {endpoint}: {error.strerror}; {remedy}") from None
        except BaseException:
            self.release()
            raise

    def _take_path(self, path: str, handed_over: socket.socket | None) -> socket.socket:
        check_directory(path)
        self._take_lock(path)
        if handed_over is not None:
            return handed_over
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise EndpointError(f"{path} exists and is not a socket; it is left alone")
            os.unlink(path)  # a daemon that died left it: we hold the lock
        old_mask = os.umask(0o117)
        try:
            sock = _listening(socket.socket(socket.AF_UNIX), path)
        finally:
            os.umask(old_mask)
        self._path = path
        os.chmod(path, 0o660)
        return sock

    def _take_lock(self, path: str) -> None:
        """Lock PATH.lock, which stays behind: removing it would let two daemons lock two files."""
        try:
            self._lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise EndpointError(
                f"endpoint {self.endpoint} is served by another latentd (process {owner}); stop "
                "it or choose another endpoint"
            ) from None
        except OSError as error:
            raise EndpointError(f"cannot lock {path}.lock: {error.strerror}; {REMEDY}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the path, under the lock, and let go of the lock. The socket is the caller's."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take_port(host: str, port: int) -> socket.socket:
    family, address = tcp_address.find(host, port)
    return _listening(tcp_address.make_socket(family), address)


def _listening(sock: socket.socket, address: str | tcp_address.Address) -> socket.socket:
    """A socket that listens; closed where it cannot."""
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def check_form(endpoint: str, is_guarded: bool = False) -> None:
    """Refuse what no machine could serve; nothing is looked at. Raises EndpointError."""
    if endpoint.startswith("ipc://"):
        size = len(os.fsencode(endpoint[6:]))
        if size > MAX_PATH_BYTES:
            raise EndpointError(
                f"endpoint {endpoint}: the path has {size} bytes, a unix socket takes at most "
                f"{MAX_PATH_BYTES}; choose a shorter one"
            )
        if endpoint[6:7] != "/":
            raise EndpointError(f"endpoint {endpoint}: the path must be absolute")
    elif endpoint.startswith("tcp://"):
        try:
            tcp_address.parse(endpoint, is_guarded)
        except ValueError as error:
            raise EndpointError(f"endpoint {endpoint}: {error}") from None
    else:
        raise EndpointError(f"endpoint {endpoint!r}: must begin with ipc:// or tcp://")


def check_directory(path: str, may_make: bool = True) -> None:
    """Look at the directory of a socket's path. One of their own is made where its parent is there,
    as /run/latentd is; a longer path that is not there is more likely a slip than a wish. Without
    `may_make` nothing is made or logged. Raises EndpointError."""
    directory = os.path.dirname(path)
    parent = os.path.dirname(directory)
    try:
        if not os.path.lexists(parent):
            raise EndpointError(
                f"socket directory {directory}: {parent} does not exist; make it, or {REMEDY}"
            )
        if not may_make and not os.path.lexists(directory):
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode=0o750)
            log.info("made socket directory %s", directory)
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise EndpointError(f"socket directory {directory}: {error.strerror}; {REMEDY}") from None
    if not stat.S_ISDIR(mode):
        raise EndpointError(f"socket directory {directory}: is a file; {REMEDY}")
    if mode & 0o007 and may_make:
        _warn_once(directory, stat.S_IMODE(mode))


@functools.cache
def _warn_once(directory: str, mode: int) -> None:
    """Both sockets lie in one directory, and are bound twice (see `preflight`)."""
    log.warning(
        "socket directory %s has mode %04o: everybody on this machine can look into it; "
        "expected is 0750", directory, mode,
    )  # fmt: skip
