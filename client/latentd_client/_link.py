"""One blocking connection to a daemon: its wire, its exchange, and how long to stay awake."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from latentd_client._exchange import Exchange
from latentd_client._request import Call, Pending, Reply, too_late
from latentd_client._wire import open_wire
from latentd_client.errors import ConnectionLost

if TYPE_CHECKING:
    from latentd_client._turns import Turns
    from latentd_client._wire import Wire
    from latentd_client.keys import CurveKeys

SLICE_MS = 100
"""Longest sleep between two looks at the deadline and the connection."""
RETRY_MS = 2
"""Between two attempts to send."""


class _Spinner:
    """The one thread of this process that polls for its reply; the others sleep. No lock: an
    interrupt could leave it held, and two that poll do no harm."""

    thread: int | None = None

    @classmethod
    def reset(cls) -> None:
        """Nobody polls (a child does not have its parent's threads)."""
        cls.thread = None


os.register_at_fork(after_in_child=_Spinner.reset)


class Link:
    """A connection and the requests in flight on it. One thread at a time."""

    def __init__(
        self, endpoint: str, spin_s: float = 0.0, timeout_s: float = 5.0,
        keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """Connect, within `timeout_s`. A wait polls from `spin_s` before until `spin_s` after the
        time that the last such call took, and sleeps else. Raises ConnectionLost,
        RequestRejected("denied")."""
        self.endpoint = endpoint
        self.exchange = Exchange()
        self._spin_s = spin_s
        self._usual_s: dict[str, float] = {}  # by op, how long the last wait took
        self._errand: Call | None = None  # of another thread, run by who has the turn
        self.wire: Wire = open_wire(endpoint, timeout_s, keys)

    def perform(self, call: Call, timeout_s: float) -> Reply | None:
        """Send a call and wait for its first reply (None when none is expected).

        Raises RequestRejected, DeadlineExceeded, ConnectionLost, ProtocolError.
        """
        deadline = time.monotonic() + timeout_s
        pending, frames = self.exchange.start(call)
        wire = self.wire
        pending.connection = wire.known_losses
        try:
            while not wire.send(frames):  # not connected (yet, or any more), or its queue is full
                if not call.expect:  # a courtesy: who made the call waits for nothing
                    return None
                self._read_all()  # the daemon may wait for that, and a loss is told behind it
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
        usual = start + self._usual_s.get(op, 0.0)  # when the last reply to such a call came
        while not pending.replies:
            message = wire.receive() or self._spin(usual, deadline)
            if message is None:
                left_ms = min(SLICE_MS, self._check(pending, deadline, timeout_s))
                if self._errand is not None:
                    self._run_errand()
                    continue
                wire.poll(self._nap_ms(usual, left_ms))
                continue
            exchange.receive(message)
            if not pending.replies and time.monotonic() >= deadline:
                raise too_late(pending.call, timeout_s)
        self._usual_s[op] = time.monotonic() - start
        return pending.take()

    def renew(self, session: str, turns: Turns) -> None:
        """Renew a session's lease, for another thread: at once if nobody has the turn, else who
        has it does that while it waits."""
        self._errand = Call("ping", {"session": session}, expect=False)
        turns.run_at_once(self._run_errand)

    def _run_errand(self) -> None:
        """Send what another thread wants sent, and read what is there: nobody else may for long."""
        if self._errand is None:
            return
        call, self._errand = self._errand, None
        self._read_all()
        self.perform(call, 0.0)

    def _read_all(self) -> None:
        """Take the messages that are there."""
        while (message := self.wire.receive()) is not None:
            self.exchange.receive(message)

    def _spin(self, usual: float, deadline: float) -> list[bytes] | None:
        """Poll for a message from `spin_s` before the usual time until `spin_s` after it: a
        processor that has gone to sleep comes back late. sched_yield lets go of the GIL and lets
        others run. None before that time, after it, and while another thread polls."""
        receive, clock, spin_s = self.wire.receive, time.monotonic, self._spin_s
        until = min(deadline, usual + spin_s)
        if not usual - spin_s <= clock() < until or not self._may_spin():
            return None
        _Spinner.thread = threading.get_ident()
        try:
            while (message := receive()) is None and clock() < until:
                os.sched_yield()
            return message
        finally:
            _Spinner.thread = None

    def _may_spin(self) -> bool:
        return self._spin_s > 0 and _Spinner.thread in (None, threading.get_ident())

    def _nap_ms(self, usual: float, most_ms: int) -> int:
        """How long to sleep now: until it is time to poll, in whole milliseconds, if it comes."""
        now = time.monotonic()
        if now >= usual + self._spin_s or not self._may_spin():
            return most_ms
        return min(most_ms, max(0, int((usual - self._spin_s - now) * 1000)))

    def _check(self, pending: Pending, deadline: float, timeout_s: float) -> int:
        """Milliseconds left to wait, rounded up. Raises when the wait is over; not because of a
        loss while there is something to read, so that a last word is not lost with it."""
        wire = self.wire
        if (pending.connection != wire.losses() or wire.is_lost) and not wire.poll(0):
            raise lost(self.endpoint)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise too_late(pending.call, timeout_s)
        return int(left_s * 1000) + 1

    def losses(self) -> int:
        """See Wire.losses."""
        return self.wire.losses()

    def reconnect(self, timeout_s: float) -> None:
        """See Wire.reconnect. What was sent before is answered no more."""
        self.wire.reconnect(timeout_s)
        self.exchange.abandon_all()

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self.wire.close()


def lost(endpoint: str) -> ConnectionLost:
    """The error for a request whose connection broke."""
    return ConnectionLost(
        f"the connection to {endpoint} broke; the request may have run: if the daemon is still "
        "there, repeat the same call safely"
    )
