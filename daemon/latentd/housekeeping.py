"""What the loop does beside requests: deadlines, leases, parked replies, the end."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from latentd.completions import complete
from latentd.runs import OpenRun, StreamRun
from latentd.runs_waiting import break_stall, let_in, turn_all_away, turn_away
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.work import Work

log = logging.getLogger(__name__)


def retry(work: Work) -> bool:
    """Try again what full peers could not take; whether one of them took anything."""
    has_moved = work.outbox.flush()
    for run in list(work.undelivered):
        sent = run.sent
        work.deliver(run)
        has_moved |= run.sent != sent or run not in work.undelivered
    return has_moved


def drop_late(work: Work) -> None:
    """Take back what has not begun when its time is over, and the prompts that are not in."""
    late = RequestRejected("deadline", "the time was over before there was room")
    for request, run in list(work.runs.items()):
        if run.expires_at <= work.now:
            run.expires_at = math.inf  # what is launched goes on
            work.stop(request, "deadline")
    for run in work.waiting:
        if run.expires_at <= work.now:
            run.expires_at = math.inf
            if not isinstance(run, StreamRun) or not run.tokens:
                turn_away(work, run, late)
    runs = (*work.runs.values(), *work.waiting)
    work.next_deadline = min((run.expires_at for run in runs), default=math.inf)


def look_after_waiting(work: Work) -> None:
    """Look again at all who wait, and let nobody wait for those who wait for him."""
    if work.waiting.count:
        work.waiting.look_again()
        let_in(work)
        break_stall(work)


def end_denied(work: Work) -> None:
    """End the sessions of those who may not connect any more."""
    work.seen_access = work.access.version
    for session in list(work.sessions):
        if not work.access.admits(session.who):
            log.info("the session of %s is ended: it may not connect any more", session.who)
            work.end_session(session)


def drop_late_adoptions(work: Work) -> None:
    """Free the pages of adoptions that nobody has gone on with for the time of a lease."""
    for session in work.sessions:
        late = [key for key, one in session.adoptions.items() if one.expires_at <= work.now]
        for key in late:
            work.drop_adoption(session, key)


def end_leases(work: Work) -> None:
    """Stop the streams of sessions that nobody renews, free what their grace period has left."""
    if work.seen_access != work.access.version:
        end_denied(work)
    lost, ended = work.sessions.overdue(work.now)
    for session in lost:
        work.stop_streams(session)
    if ended:
        log.info("silent beyond lease and grace, slots are freed: %d sessions", len(ended))
    for session in ended:
        work.end_session(session)
    work.sessions.forget_old(work.now)


def end_lost(work: Work) -> None:
    """The daemon drains: a stream whose reader is gone is not waited for, and nobody waits for
    room."""
    turn_all_away(work, RequestRejected("draining", "the daemon is about to stop; use another one"))
    for run in list(work.runs.values()):
        if isinstance(run, StreamRun) and run.is_lost:
            work.engine.cancel(run.request, "draining")


def end_runs(work: Work) -> None:
    """The drain time is over: what is launched commits, the rest ends as `draining`."""
    for request, run in list(work.runs.items()):
        if isinstance(run, OpenRun | StreamRun):
            work.engine.cancel(request, "draining")
    for _ in range(4):
        if work.engine.has_work:
            complete(work, work.engine.run())
    refuse_all(work, RequestRejected("draining", "the daemon stops"))


def refuse_all(work: Work, refusal: RequestRejected) -> None:
    """Answer everybody who still waits for the engine."""
    for run in (*work.runs.values(), *work.waiting):
        work.waiting.leave(run)
        work.refuse(run, refusal)
    work.runs.clear()
