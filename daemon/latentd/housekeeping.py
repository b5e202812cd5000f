"""What the loop does beside requests: deadlines, leases, parked replies, the end, figures."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from latentd.completions import complete
from latentd.runs import OpenRun, StreamRun
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.work import Work
    from latentd_client.protocol import Header

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
    for request, run in list(work.runs.items()):
        if run.expires_at <= work.now:
            run.expires_at = math.inf  # what is launched goes on
            work.engine.cancel(request, "deadline")
    work.next_deadline = min((run.expires_at for run in work.runs.values()), default=math.inf)


def drop_late_adoptions(work: Work) -> None:
    """Free the pages of adoptions that nobody has gone on with for the time of a lease."""
    for session in work.sessions:
        late = [key for key, one in session.adoptions.items() if one.expires_at <= work.now]
        for key in late:
            work.drop_adoption(session, key)


def end_leases(work: Work) -> None:
    """Stop the streams of sessions that nobody renews, free what their grace period has left."""
    lost, ended = work.sessions.overdue(work.now)
    for session in lost:
        work.stop_streams(session)
    for session in ended:
        log.info("a session was silent beyond lease and grace: its slots are freed")
        work.end_session(session)
    work.sessions.forget_old(work.now)


def end_lost(work: Work) -> None:
    """The daemon drains: a stream whose reader is gone is not waited for."""
    for run in list(work.runs.values()):
        if isinstance(run, StreamRun) and run.is_lost:
            work.engine.cancel(run.request, "draining")


def end_runs(work: Work) -> None:
    """The drain time is over: what is launched commits, the rest ends as `draining`."""
    for run in list(work.runs.values()):
        if isinstance(run, OpenRun | StreamRun):
            work.engine.cancel(run.request, "draining")
    for _ in range(4):
        if work.engine.has_work:
            complete(work, work.engine.run())
    refuse_all(work, RequestRejected("draining", "the daemon stops"))


def refuse_all(work: Work, refusal: RequestRejected) -> None:
    """Answer everybody who still waits for the engine."""
    for run in list(work.runs.values()):
        work.refuse(run, refusal)
    work.runs.clear()


def stats(work: Work) -> Header:
    """The engine's figures, and under `server` those of the serving side."""
    server = {
        "sessions": len(work.sessions),
        "runs": len(work.runs),
        "parked_streams": len(work.undelivered),
        "lost_streams": sum(
            isinstance(run, StreamRun) and run.is_lost for run in work.runs.values()
        ),
        **work.outbox.counters,
    }
    figures = {str(key): _plain(value) for key, value in work.engine.stats().items()}
    return {**figures, "server": server}


def _plain(value: object) -> object:
    """Maps with text keys, as the wire wants them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
