"""Binding an endpoint safely: path length, directory, permissions, and a lock against a second
daemon (libzmq would let it steal the path without a word). It knows nothing of messages."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import stat
from typing import Protocol

import zmq

from latentd_client import protocol

MAX_PATH_BYTES = 107
"""sun_path of a unix socket holds 108 bytes, the last is 0 (unix(7))."""
REMEDY = "choose a place of your own with --endpoint or LATENTD_ENDPOINT"
"""What helps a user who has no rights where the daemon's socket usually lies."""

log = logging.getLogger(__name__)


class EndpointError(Exception):
    """An endpoint that cannot be served; the text names it, the reason and what to do."""


class Bindable(Protocol):
    """A socket, ours or of libzmq."""

    def bind(self, endpoint: str, /) -> object:
        """Listen there."""


class Binding:
    """One endpoint, bound and locked until `release`. `endpoint` is where clients connect."""

    def __init__(
        self, socket: Bindable, endpoint: str, is_bound: bool = False, is_guarded: bool = False
    ) -> None:
        """Bind the socket. With `is_bound` a path is only locked: the service manager has bound it
        and takes it away (`handed_over`). A tcp socket that `is_guarded` (CURVE) may be reached
        from other machines. Raises EndpointError."""
        self.endpoint = endpoint
        self._path: str | None = None
        self._lock = -1
        try:
            check_form(endpoint, is_guarded)
            if endpoint.startswith("ipc://"):
                self._bind_path(socket, endpoint[6:], is_bound)
            else:
                socket.bind(endpoint)
                assert isinstance(socket, zmq.Socket)
                last = socket.getsockopt(zmq.LAST_ENDPOINT)
                self.endpoint = bytes(last).rstrip(b"\0").decode()
        except (zmq.ZMQError, OSError) as error:
            self.release()
            raise EndpointError(f"cannot bind {endpoint}: {error}") from None
        except BaseException:
            self.release()
            raise

    def _bind_path(self, socket: Bindable, path: str, is_bound: bool) -> None:
        check_directory(path)
        self._take_lock(path)
        if is_bound:
            return
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise EndpointError(f"{path} exists and is not a socket; it is left alone")
            os.unlink(path)  # a daemon that died left it: we hold the lock
        old_mask = os.umask(0o117)
        try:
            socket.bind(self.endpoint)
        finally:
            os.umask(old_mask)
        self._path = path
        os.chmod(path, 0o660)

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
        _check_address(endpoint, is_guarded)
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


def _check_address(endpoint: str, is_guarded: bool) -> None:
    if not protocol.has_port(endpoint):
        raise EndpointError(f"endpoint {endpoint}: it must end with a port, 0 to 65535")
    if is_guarded:
        return
    host = endpoint[6:].rpartition(":")[0].strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise EndpointError(
            f"endpoint {endpoint}: without CURVE tcp is served on loopback only (127.0.0.1 or "
            "[::1]); make a key with `latentd keygen FILE`, set curve_key to it and curve_clients "
            "to a file of the clients' public keys"
        )
