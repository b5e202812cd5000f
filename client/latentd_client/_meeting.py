"""What the monitor of a socket of libzmq tells: its connection was made, refused, or broke.

libzmq itself says nothing of a handshake that fails: what is sent then waits for ever.
"""

from __future__ import annotations

import math
import time
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from latentd_client.errors import ConnectionLost, LatentdError, RequestRejected

EVENTS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
OTHER_MECHANISM: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
MOST_BREAKS: Final = 8
"""Handshakes in a row that may break off without a reason, within about half a second: a daemon may
be about to restart, and a daemon's other mechanism is seen or not, as it happens."""
WANTS_KEYS: Final = (
    "wants CURVE keys: give `keys`, or set LATENTD_CLIENT_KEY and LATENTD_SERVER_KEY"
)


class Meeting:
    """The handshakes of a DEALER of libzmq. `is_made` once one has succeeded; `fault` says why they
    do not, where more of them would not help. Somebody has to take what the monitor tells: libzmq
    waits when it is full."""

    def __init__(self, dealer: zmq.Socket[bytes], endpoint: str, has_keys: bool) -> None:
        """Watch a socket from now on."""
        self.is_made = False
        self.fault: LatentdError | None = None
        self.monitor = dealer.get_monitor_socket(EVENTS)
        self._dealer = dealer
        self._endpoint = endpoint
        self._has_keys = has_keys
        self._breaks = 0

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first handshake; whether there was one. Raises the fault."""
        deadline = time.monotonic() + timeout_s
        while not self.look():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.monitor.poll(math.ceil(min(left_s, 3600.0) * 1000))
        return True

    def look(self) -> bool:
        """Take the news that are there; whether hands were shaken. Raises the fault."""
        while not self.is_made and self.fault is None and self.monitor.poll(0):
            self.take()
        if self.fault is not None:
            raise self.fault
        return self.is_made

    def take(self) -> int:
        """The next event, of which there is one."""
        message = parse_monitor_message(self.monitor.recv_multipart())
        event = int(message["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_made, self.fault, self._breaks = True, None, 0
        elif event != zmq.EVENT_DISCONNECTED:
            self._breaks += 1
            self.fault = self._explain(event, int(message["value"]))
        return event

    def _explain(self, event: int, value: int) -> LatentdError | None:
        """Why a handshake failed."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return denied(self._endpoint)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value != OTHER_MECHANISM:
                return ConnectionLost(f"{self._endpoint} does not speak ZMTP 3")
            text = "does not encrypt, leave the keys out" if self._has_keys else WANTS_KEYS
            return RequestRejected("denied", f"{self._endpoint} {text}")
        if self._breaks < MOST_BREAKS:
            return None
        hint = "is the server key its own?" if self._has_keys else f"perhaps it {WANTS_KEYS}"
        return ConnectionLost(f"{self._endpoint} breaks off the handshake: {hint}")

    def close(self) -> None:
        """Watch no longer; a second time does nothing."""
        if not self.monitor.closed:
            self._dealer.disable_monitor()
            self.monitor.close()


def denied(endpoint: str) -> RequestRejected:
    """The error of who is not let in."""
    if endpoint.startswith("ipc://"):
        why = "this user is not among those who may connect (allow_users, allow_groups)"
    else:
        why = "this client's key is not among those that may connect (curve_clients)"
    return RequestRejected("denied", f"{endpoint} lets this client not in: {why}")
