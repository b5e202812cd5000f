"""One blocking connection to a daemon: a socket, its exchange, and whether it is alive."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import zmq

from latentd_client import protocol
from latentd_client._exchange import Call, Exchange, Pending, Reply, too_late
from latentd_client.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_MS = 100
"""Longest wait between two looks at the deadline and the connection."""
SLICE_S = SLICE_MS / 1000
RCVMORE, SNDMORE = int(zmq.RCVMORE), int(zmq.SNDMORE)
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_spinner = threading.Lock()
"""Held by the one thread of this process that polls for its reply; the others sleep."""


def make_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A DEALER without a routing id of its own (a fixed one loses messages after a reconnect).
    IMMEDIATE: nothing is queued for a daemon that is not there."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
    dealer.setsockopt(zmq.RCVTIMEO, SLICE_MS)
    dealer.setsockopt(zmq.SNDTIMEO, SLICE_MS)
    dealer.setsockopt(zmq.IPV6, 1)
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


def check_listener(endpoint: str) -> None:
    """Raise ConnectionLost unless somebody listens on an ipc path. libzmq would not tell: it
    connects to a dead path and sends into the void. Other transports are not looked at."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectionLost(f"no daemon listens at {endpoint}: {reason}; is it running?") from None
    finally:
        probe.close()


class Link:
    """A connected socket and the requests in flight on it. One thread at a time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, spin_s: float = 0.0
    ) -> None:
        """Connect. A wait polls for `spin_s` around the time that such a call took last."""
        self.endpoint = endpoint
        self.exchange = Exchange()
        self._spin_s = spin_s
        self._usual_s: dict[str, float] = {}  # by op, how long the last wait took
        self.socket = make_socket(context)
        self._send = super(zmq.Socket, self.socket).send  # without the wrapper's half microsecond
        self._losses: Callable[[], int] = lambda: 0
        try:
            connect(self.socket, endpoint)
        except BaseException:  # left open it would keep the context's end waiting
            self.socket.close()
            raise

    def watch(self, losses: Callable[[], int]) -> None:
        """Use `losses`, the number of times the connection was lost so far."""
        self._losses = losses

    def perform(self, call: Call, timeout_s: float) -> Reply | None:
        """Send a call and wait for its first reply (None when none is expected).

        Raises RequestRejected, DeadlineExceeded, ConnectionLost, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        pending, frames = self.exchange.start(call)
        pending.connection = self._losses()
        try:
            while True:
                try:
                    for frame in frames[:-1]:  # only the first can fail: a message is taken whole
                        self._send(frame, SNDMORE)
                    self._send(frames[-1])
                    break
                except zmq.Again:  # not connected (yet, or any more), or its queue is full
                    if not call.expect:  # a courtesy: who made the call waits for nothing
                        return None
                    self._check(pending, deadline, timeout_s)
            return self.wait(pending, timeout_s, deadline) if call.expect else None
        except BaseException:
            if not call.is_kept:
                self.exchange.abandon(pending)
            raise

    def wait(self, pending: Pending, timeout_s: float, deadline: float | None = None) -> Reply:
        """Wait for the next reply of a request. Raises like `perform`."""
        if deadline is None:
            deadline = time.monotonic() + timeout_s
        receive, sock, op = self.exchange.receive, self.socket, pending.call.op
        start = time.monotonic()
        if self._spin_s and not pending.replies:
            self._spin(start, min(deadline, start + self._usual_s.get(op, 0.0)), deadline)
        while not pending.replies:
            if deadline - time.monotonic() < SLICE_S:
                self._wait_briefly(pending, deadline, timeout_s)
            try:
                frames = [sock.recv()]
            except zmq.Again:
                self._check(pending, deadline, timeout_s, is_read=True)
                continue
            while sock.getsockopt(RCVMORE):
                frames.append(sock.recv())
            receive(frames)
        self._usual_s[op] = time.monotonic() - start
        return pending.take()

    def _spin(self, start: float, usual: float, deadline: float) -> None:
        """Be awake when the message comes: a processor that has gone to sleep comes back late.

        Polls from `spin_s` before the time at which the last reply to such a call would have come
        until `spin_s` after it, and sleeps before that, in whole milliseconds and only if a message
        can end it. sched_yield lets go of the GIL and lets libzmq's own thread run."""
        nap_ms = int((usual - start - self._spin_s) * 1000)
        if nap_ms > 0 and self.socket.poll(nap_ms):
            return
        if not _spinner.acquire(blocking=False):
            return
        try:
            get_events = self.socket.getsockopt
            until = min(deadline, usual + self._spin_s)
            while not int(get_events(EVENTS)) & POLLIN and time.monotonic() < until:
                os.sched_yield()
        finally:
            _spinner.release()

    def _wait_briefly(self, pending: Pending, deadline: float, timeout_s: float) -> None:
        """The last slice before the deadline. Raises unless there is a message."""
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        if not self.socket.poll(left_ms):
            self._check(pending, 0.0, timeout_s)

    def _check(
        self, pending: Pending, deadline: float, timeout_s: float, is_read: bool = False
    ) -> None:
        """Raise when the wait is over. `is_read`: the caller goes on reading, so that a last word
        which came before the connection broke is not lost with it."""
        if pending.connection != self._losses() and not (is_read and self.socket.poll(0)):
            raise lost(self.endpoint)
        if time.monotonic() >= deadline:
            raise too_late(pending.call, timeout_s)

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self.socket.close()


def lost(endpoint: str) -> ConnectionLost:
    """The error for a request whose connection broke."""
    return ConnectionLost(
        f"the connection to {endpoint} broke; the request may have run: if the daemon is still "
        "there, repeat the same call safely"
    )
