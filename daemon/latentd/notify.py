"""Messages to the service manager: one datagram each to $NOTIFY_SOCKET; silent without one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


LOADING_S: Final = 600.0
"""How long start-up or saving may go on without a word before the manager takes it for hung."""


class Notifier:
    """Speaks the protocol of sd_notify(3); a message that cannot be sent is never an error."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "") if watched else ""
        # A third of the time allowed: one message may be late and another lost.
        self._watchdog_ns = int(usec) * 1000 // 3 if usec.isdigit() else 0
        self._next_watchdog_ns = 0

    def send(self, **fields: object) -> None:
        """Send assignments, for example send(READY=1, STATUS="serving")."""
        if not self._address:
            return
        lines = [f"{key}={' '.join(str(value).split())}" for key, value in fields.items()]
        with (
            contextlib.suppress(OSError),  # the manager is gone or slow; serving goes on
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
        ):
            sender.sendto("\n".join(lines).encode(), self._address)

    def loading(self, status: str, extend_s: float = LOADING_S) -> None:
        """Say what start or stop is doing, and ask for `extend_s` seconds from now to go on."""
        self.send(STATUS=status, EXTEND_TIMEOUT_USEC=int(extend_s * 1e6))

    def tick(self) -> None:
        """Feed the watchdog when a third of its time has passed; cheap enough for every loop."""
        if self._watchdog_ns and (now := time.monotonic_ns()) >= self._next_watchdog_ns:
            self._next_watchdog_ns = now + self._watchdog_ns
            self.send(WATCHDOG=1)

    def reloading(self) -> None:
        """Announce a reload; send(READY=1) ends it."""
        self.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
