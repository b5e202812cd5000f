"""One blocking connection to a daemon: its wire, its exchange, and how long to stay awake."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from latentd_client._exchange import Call, Exchange, Pending, Reply, too_late
from latentd_client._wire import open_wire
from latentd_client.errors import ConnectionLost

if TYPE_CHECKING:
    from latentd_client._wire import Wire

SLICE_MS = 100
"""Longest sleep between two looks at the deadline and the connection."""
RETRY_MS = 2
"""Between two attempts to send."""

_spinner = threading.Lock()
"""Held by the one thread of this process that polls for its reply; the others sleep."""


class Link:
    """A connection and the requests in flight on it. One thread at a time."""

    def __init__(self, endpoint: str, spin_s: float = 0.0, timeout_s: float = 5.0) -> None:
        """Connect, within `timeout_s`. A wait polls for `spin_s` around the time that such a call
        took last. Raises ConnectionLost."""
        self.endpoint = endpoint
        self.exchange = Exchange()
        self._spin_s = spin_s
        self._usual_s: dict[str, float] = {}  # by op, how long the last wait took
        self.wire: Wire = open_wire(endpoint, timeout_s)

    def perform(self, call: Call, timeout_s: float) -> Reply | None:
        """Send a call and wait for its first reply (None when none is expected).

        Raises RequestRejected, DeadlineExceeded, ConnectionLost, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        pending, frames = self.exchange.start(call)
        wire = self.wire
        pending.connection = wire.losses()
        try:
            while not wire.send(frames):  # not connected (yet, or any more), or its queue is full
                if not call.expect:  # a courtesy: who made the call waits for nothing
                    return None
                self._check(pending, deadline, timeout_s)
                time.sleep(RETRY_MS / 1000)
            return self.wait(pending, timeout_s, deadline) if call.expect else None
        except BaseException:
            if not call.is_kept:
                self.exchange.abandon(pending)
            raise

    def wait(self, pending: Pending, timeout_s: float, deadline: float | None = None) -> Reply:
        """Wait for the next reply of a request. Raises like `perform`."""
        start = time.monotonic()
        if deadline is None:
            deadline = start + timeout_s
        exchange, wire, op = self.exchange, self.wire, pending.call.op
        if self._spin_s and not pending.replies:
            usual = min(deadline, start + self._usual_s.get(op, 0.0))
            message = self._spin(start, usual, deadline)
            if message is not None:
                exchange.receive(message)
        while not pending.replies:
            message = wire.receive()
            if message is not None:
                exchange.receive(message)
                continue
            left_ms = self._check(pending, deadline, timeout_s)
            wire.poll(min(SLICE_MS, left_ms))
        self._usual_s[op] = time.monotonic() - start
        return pending.take()

    def _spin(self, start: float, usual: float, deadline: float) -> list[bytes] | None:
        """Be awake when the message comes: a processor that has gone to sleep comes back late.

        Polls from `spin_s` before the time at which the last reply to such a call would have come
        until `spin_s` after it, and sleeps before that, in whole milliseconds and only if a message
        can end it. sched_yield lets go of the GIL and lets others run."""
        receive, clock = self.wire.receive, time.monotonic
        nap_ms = int((usual - start - self._spin_s) * 1000)
        if (nap_ms > 0 and self.wire.poll(nap_ms)) or not _spinner.acquire(blocking=False):
            return receive()
        try:
            until = min(deadline, usual + self._spin_s)
            while (message := receive()) is None and clock() < until:
                os.sched_yield()
            return message
        finally:
            _spinner.release()

    def _check(self, pending: Pending, deadline: float, timeout_s: float) -> int:
        """Milliseconds left to wait, rounded up. Raises when the wait is over; not because of a
        loss while there is something to read, so that a last word is not lost with it."""
        if pending.connection != self.wire.losses() and not self.wire.poll(0):
            raise lost(self.endpoint)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise too_late(pending.call, timeout_s)
        return int(left_s * 1000) + 1

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self.wire.close()


def lost(endpoint: str) -> ConnectionLost:
    """The error for a request whose connection broke."""
    return ConnectionLost(
        f"the connection to {endpoint} broke; the request may have run: if the daemon is still "
        "there, repeat the same call safely"
    )
