"""How the blocking clients move messages: `Wire`, and the one of libzmq."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import zmq

from latentd_client import protocol
from latentd_client._handshake import check_listener, no_hello
from latentd_client._meeting import Meeting
from latentd_client._zmtp import ZmtpWire
from latentd_client.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd_client._watch import Watch
    from latentd_client.keys import CurveKeys

RCVMORE, SNDMORE, NOBLOCK = int(zmq.RCVMORE), int(zmq.SNDMORE), int(zmq.NOBLOCK)
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain ints: zmq's enums cost a microsecond for each `&` and `|`."""


class Wire(Protocol):
    """One connection as a DEALER; a message is a list of frames. One thread at a time."""

    @property
    def meeting(self) -> Meeting | None:
        """Of a connection of libzmq: somebody has to watch it, or close it (`Meeting`)."""

    @property
    def is_lost(self) -> bool:
        """Whether it is gone until `reconnect`."""

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message, or nothing of it: False when it is not connected or its queue is full."""

    def receive(self) -> list[bytes] | None:
        """The next message that is there, or None."""

    def poll(self, timeout_ms: int) -> bool:
        """Sleep until there may be a message, at most so long; whether there may be one."""

    @property
    def known_losses(self) -> int:
        """How often the connection was lost, as far as is known without looking."""

    def losses(self) -> int:
        """Look whether it is lost; how often it was so far."""

    def reconnect(self, timeout_s: float) -> None:
        """Make a lost connection again, within `timeout_s`. Raises ConnectionLost when nobody
        listens, RequestRejected("denied")."""

    def close(self) -> None:
        """Close it; what was not sent is dropped."""


def open_wire(endpoint: str, timeout_s: float, keys: CurveKeys | None = None) -> Wire:
    """Connect to an endpoint and shake hands within `timeout_s`; `keys` are for tcp. Raises
    ConnectionLost, RequestRejected("denied")."""
    if endpoint.startswith("ipc://"):
        return ZmtpWire(endpoint, timeout_s)
    return ZmqWire(endpoint, timeout_s, keys)


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None
) -> zmq.Socket[bytes]:
    """A DEALER without a routing id of its own (a fixed one loses messages after a reconnect).
    IMMEDIATE: nothing is queued for a daemon that is not there. Raises ConnectionLost."""
    try:
        dealer = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:  # no descriptor is left
        raise ConnectionLost(f"cannot make a socket: {error}") from None
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
    dealer.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
    return dealer


def connect(dealer: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect after looking whether somebody listens. Raises ConnectionLost if not."""
    check_listener(endpoint)
    if not protocol.has_port(endpoint):
        raise ConnectionLost(f"cannot connect to {endpoint}: its port is not 0 to 65535")
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConnectionLost(f"cannot connect to {endpoint!r}: {error}") from None


class ZmqWire:
    """A `Wire` over libzmq, which makes a lost connection again by itself."""

    is_lost = False

    def __init__(self, endpoint: str, timeout_s: float, keys: CurveKeys | None = None) -> None:
        """Connect and shake hands. Raises ConnectionLost, RequestRejected("denied")."""
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._watch: Watch | None = None
        dealer = self._dealer = make_socket(self._context, keys)
        self._send = super(zmq.Socket, dealer).send  # without the wrapper's microsecond
        self.meeting = Meeting(dealer, endpoint, keys is not None)
        try:
            connect(dealer, endpoint)
            if not self.meeting.wait(timeout_s):
                raise no_hello(endpoint, timeout_s)
        except BaseException:  # left open it would keep the context's end waiting
            self.close()
            raise

    def watch(self, watch: Watch) -> None:
        """From now on this one sees whether the connection breaks."""
        self._watch = watch

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """See Wire.send."""
        if self._watch is not None and self._watch.is_down:
            return False
        try:
            for part in frames[:-1]:  # only the first can fail: a message is taken whole
                self._send(part, SNDMORE | NOBLOCK)
            self._send(frames[-1], NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """See Wire.receive."""
        sock = self._dealer
        if not int(sock.getsockopt(EVENTS)) & POLLIN:
            return None
        frames = [sock.recv(NOBLOCK)]
        while sock.getsockopt(RCVMORE):
            frames.append(sock.recv(NOBLOCK))
        return frames

    def poll(self, timeout_ms: int) -> bool:
        """See Wire.poll."""
        return bool(self._dealer.poll(timeout_ms))

    @property
    def known_losses(self) -> int:
        """See Wire.known_losses."""
        return self._watch.losses if self._watch is not None else 0

    def losses(self) -> int:
        """See Wire.losses."""
        return self.known_losses

    def reconnect(self, timeout_s: float) -> None:
        """See Wire.reconnect. libzmq has done it, or tries; it never says that nobody listens. Who
        was not let in any more has to ask for another attempt."""
        if self._watch is not None and (fault := self._watch.take_fault()) is not None:
            self._dealer.disconnect(self.endpoint)
            self._dealer.connect(self.endpoint)
            raise fault

    def close(self) -> None:
        """See Wire.close."""
        self.meeting.close()
        self._dealer.close()
        self._context.term()
