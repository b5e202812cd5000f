"""Peers of the daemon's own ROUTER that speak ZMTP by hand, and the router's turns."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

from dialling import dial
from gates import PATIENCE_S
from latentd_client.zmtp import GREETING, frame, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from latentd.routing import Message
    from latentd.zmtp_router import ZmtpRouter

DEALER_READY = ready(b"DEALER")
MAX_FRAME_BYTES, MAX_FRAMES = 4 << 20, 16
"""Of the messages that the tests' router takes."""


def await_message(router: ZmtpRouter) -> Message:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if (received := router.receive()) is not None:
            return received
        router.sleep(100)
    raise AssertionError(f"no message within {PATIENCE_S} s")


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


def run_until(router: ZmtpRouter, holds: Callable[[], bool]) -> list[Message]:
    """The same until something holds, for what need not have arrived at once."""
    received = []
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"it has not come to that within {PATIENCE_S} s"
        router.sleep(10)
        received += run(router, 2)
    return received


def connect(
    where: str, router: ZmtpRouter, hello: bytes = GREETING + DEALER_READY
) -> socket.socket:
    """A connection by hand that has said `hello`."""
    sock = dial(where, 5)
    sock.sendall(hello)
    run_awake(router, 4)
    return sock


def greeted(where: str, router: ZmtpRouter) -> tuple[socket.socket, bytes]:
    """A connection by hand and the router's name for it."""
    sock = shaken(where, router)
    sock.sendall(frame(b"hello"))
    return sock, await_message(router)[0]


def num_descriptors() -> int:
    """How many this process holds."""
    return len(os.listdir("/proc/self/fd"))


def has_ended(sock: socket.socket) -> bool:
    """Whether the other end is closed, of one that has nothing to say any more, by now."""
    sock.settimeout(0.01)
    return is_closed(sock)


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


def shaken(where: str, router: ZmtpRouter) -> socket.socket:
    """A connection by hand that has read the router's side of the handshake too."""
    sock = connect(where, router)
    expected = GREETING + ready(b"ROUTER")
    peek = socket.MSG_PEEK | socket.MSG_DONTWAIT

    def has_said_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            return len(sock.recv(len(expected), peek)) == len(expected)
        return False

    run_until(router, has_said_all)
    assert sock.recv(len(expected)) == expected
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
