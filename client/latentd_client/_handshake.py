"""The handshake that opens an ipc connection (`_zmtp` says why), and a look for a listener."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from typing import Final

from latentd_client import zmtp
from latentd_client._meeting import denied
from latentd_client.errors import ConnectionLost, LatentdError

RETRY_S: Final = 0.01
"""Between two attempts to connect to a listener whose queue of connections is full."""


READY: Final = zmtp.ready(b"DEALER")


def handshake(endpoint: str, timeout_s: float) -> socket.socket:
    """A connected socket, greetings exchanged, not blocking; all within `timeout_s`. Raises
    ConnectionLost."""
    deadline = time.monotonic() + timeout_s
    sock = _make_socket(endpoint)
    try:
        _connect(sock, endpoint, deadline)
        _limit(sock, deadline)
        sock.sendall(zmtp.GREETING)
        theirs = _read(sock, len(zmtp.GREETING), deadline)
        if fault := zmtp.greeting_fault(theirs):
            raise ConnectionLost(f"{endpoint} {fault}")
        _limit(sock, deadline)
        sock.sendall(READY)
        flags, size = _read(sock, 2, deadline)
        body = _read(sock, size, deadline)
        if flags != zmtp.COMMAND or body[:6] != b"\x05READY":
            raise _refusal(endpoint, flags, bytes(body))
        sock.setblocking(False)
    except TimeoutError:
        sock.close()
        raise ConnectionLost(f"{endpoint} did not say hello within {timeout_s:.3g} s") from None
    except (OSError, ValueError) as error:  # a path that cannot be one is a ValueError
        sock.close()
        raise no_daemon(endpoint, error) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _refusal(endpoint: str, flags: int, body: bytes) -> LatentdError:
    """The error for who is not let in, or for a command that is none of a handshake."""
    if flags == zmtp.COMMAND and body == zmtp.error(zmtp.NO_ACCESS)[2:]:
        return denied(endpoint)
    return ConnectionLost(f"{endpoint} refused the connection: {body!r:.80}")


def _make_socket(endpoint: str) -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left
        raise ConnectionLost(f"cannot connect to {endpoint}: {error.strerror}") from None


def _connect(sock: socket.socket, endpoint: str, deadline: float) -> None:
    """Connect; a full queue of connections (EAGAIN, at once) is tried again until the deadline."""
    while True:
        _limit(sock, deadline)
        try:
            sock.connect(endpoint.removeprefix("ipc://"))
            return
        except BlockingIOError:
            time.sleep(RETRY_S)


def _limit(sock: socket.socket, deadline: float) -> None:
    """Let the next call take what is left of the time. Raises TimeoutError when nothing is."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(min(left_s, 3600.0))


def _read(sock: socket.socket, size: int, deadline: float) -> bytearray:
    """Exactly `size` bytes. Raises OSError."""
    data = bytearray()
    while len(data) < size:
        _limit(sock, deadline)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        data += part
    return data


def no_daemon(endpoint: str, error: OSError | ValueError) -> ConnectionLost:
    """The error for an ipc path at which nobody listens."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConnectionLost(f"no daemon listens at {endpoint!s}: {reason}; is it running?")


def no_hello(endpoint: str, timeout_s: float) -> ConnectionLost:
    """The error for a daemon that did not answer in time when it was first spoken to."""
    return ConnectionLost(f"{endpoint} did not say hello within {timeout_s:.3g} s")


def check_listener(endpoint: str) -> None:
    """Raise ConnectionLost unless somebody listens on an ipc path. libzmq would not tell: it
    connects to a dead path and sends into the void. Other transports are not looked at."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return
    with contextlib.closing(_make_socket(endpoint)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except BlockingIOError:  # it listens, its queue of connections is full
            return
        except (OSError, ValueError) as error:
            raise no_daemon(endpoint, error) from None
