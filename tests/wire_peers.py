"""Peers of the daemon's own ROUTER that speak ZMTP by hand, and the router's turns."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from latentd_client.zmtp import GREETING, frame, ready

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from latentd.routing import Message
    from latentd.zmtp_router import ZmtpRouter

DEALER_READY = ready(b"DEALER")
MAX_FRAME_BYTES, MAX_FRAMES = 4 << 20, 16
"""Of the messages that the tests' router takes."""


def await_message(router: ZmtpRouter) -> Message:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if (received := router.receive()) is not None:
            return received
        router.sleep(100)
    raise AssertionError("no message within 10 s")


def run(router: ZmtpRouter, times: int = 20) -> list[Message]:
    """Let the router deal with what has arrived; the messages among it."""
    return [received for _ in range(times) if (received := router.receive()) is not None]


def run_awake(router: ZmtpRouter, times: int) -> list[Message]:
    """The same as a loop with nothing else to do: nobody rests."""
    received = []
    for _ in range(times):
        router.sleep(0)
        received += run(router, 1)
    return received


def connect(
    path: Path, router: ZmtpRouter, hello: bytes = GREETING + DEALER_READY
) -> socket.socket:
    """A connection by hand that has said `hello`."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(str(path))
    sock.sendall(hello)
    run_awake(router, 4)
    return sock


def greeted(path: Path, router: ZmtpRouter) -> tuple[socket.socket, bytes]:
    """A connection by hand and the router's name for it."""
    sock = shaken(path, router)
    sock.sendall(frame(b"hello"))
    return sock, await_message(router)[0]


def num_descriptors() -> int:
    """How many this process holds."""
    return len(os.listdir("/proc/self/fd"))


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end is closed, after whatever it has said."""
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def shaken(path: Path, router: ZmtpRouter) -> socket.socket:
    """A connection by hand that has read the router's side of the handshake too."""
    sock = connect(path, router)
    assert sock.recv(64, socket.MSG_WAITALL) == GREETING
    expected = ready(b"ROUTER")
    assert sock.recv(len(expected), socket.MSG_WAITALL) == expected
    return sock


def pass_time(router: ZmtpRouter, seconds: int, in_use: Container[bytes] = ()) -> list[Message]:
    """Let time pass, with a turn of the router and a tick in each half second."""
    received = []
    start = getattr(router, "_test_time", 1000.0)
    for half in range(2 * seconds + 1):
        received += run(router, 2)
        router.tick(start + half / 2, lambda: in_use)
    router._test_time = start + seconds  # type: ignore[attr-defined]
    return received
