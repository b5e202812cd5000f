"""When the engine thread does what is due now and then between launches (`housekeeping` has what).
It knows no messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from latentd import housekeeping

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from latentd.routing import Router
    from latentd.work import Work

TICK_S = 0.05
"""Between two looks at deadlines while there is work."""
IDLE_TICK_S = 0.25
"""The same when idle (four wake-ups a second), and between two looks at leases."""
PAUSE_S = 0.5
"""From this on a look at leases that comes too late postpones their ends: the daemon was stopped
(SIGSTOP, a debugger) or the device busy, and heard nobody meanwhile."""
RETRY_S, MAX_RETRY_S = 0.002, 0.02
"""Between two attempts to send to full peers; doubled while none of them takes anything (one that
is stopped in a debugger must not keep the daemon busy)."""


class Upkeep:
    """Leases, deadlines of adoptions, parked replies, the router's own, and the watchdog."""

    def __init__(
        self, work: Work, router: Router, posts: deque[Callable[[], None]],
        on_tick: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """`posts` are what other threads want done here in the next turn; `on_tick` is called a few
        times a second."""
        self._work = work
        self._router = router
        self._posts = posts
        self._on_tick = on_tick
        self._tick_at = self._retry_at = 0.0
        self._leases_at = time.monotonic()
        self._retry_s = RETRY_S

    def turn(self, now: float) -> None:
        """Do what is due."""
        while self._posts:
            self._posts.popleft()()
        if now >= self._tick_at:
            self._tick(now)
        if now >= self._retry_at and (self._work.outbox.has_parked or self._work.undelivered):
            has_moved = housekeeping.retry(self._work)
            self._retry_s = RETRY_S if has_moved else min(MAX_RETRY_S, 2 * self._retry_s)
            self._retry_at = now + self._retry_s

    def next_turn(self) -> float:
        """When something is due without a message."""
        if self._work.outbox.has_parked or self._work.undelivered:
            return min(self._tick_at, self._retry_at)
        return self._tick_at

    def _tick(self, now: float) -> None:
        work = self._work
        is_idle = not (work.runs or work.undelivered or work.waiting.count)
        self._tick_at = now + (IDLE_TICK_S if is_idle else TICK_S)
        self._router.tick(now, work.sessions.peers)
        if now >= self._leases_at:
            if now - self._leases_at > PAUSE_S:
                work.sessions.postpone(now - self._leases_at)
            self._leases_at = now + IDLE_TICK_S
            housekeeping.end_leases(work)
            housekeeping.drop_late_adoptions(work)
            housekeeping.look_after_waiting(work)
        if self._on_tick is not None:
            self._on_tick()
