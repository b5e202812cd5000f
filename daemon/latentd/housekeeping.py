"""What the loop does beside requests: deadlines, leases, parked replies, the end, figures."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from latentd.completions import complete
from latentd.runs import OpenRun, StreamRun
from latentd.runs_waiting import break_stall, let_in, turn_all_away, turn_away
from latentd_client import __version__
from latentd_client.errors import RequestRejected
from latentd_kernels import ARITHMETIC_VERSION

if TYPE_CHECKING:
    from latentd.operations import ModelInfo
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


def stats(work: Work) -> Header:
    """The engine's figures, and under `server` those of the serving side."""
    server = {
        "sessions": len(work.sessions),
        "runs": len(work.runs),
        "parked_streams": len(work.undelivered),
        "waiting": work.waiting.count,
        "admitted_late": work.waiting.admitted,
        "lost_streams": sum(
            isinstance(run, StreamRun) and run.is_lost for run in work.runs.values()
        ),
        **work.outbox.counters,
    }
    figures = {str(key): _plain(value) for key, value in work.engine.stats().items()}
    figures["histograms"]["first_token"] = work.first_token.figures()
    build = build_info(work.engine.info)
    return {**figures, "refused": dict(work.outbox.refused), "server": server, "build": build}


def build_info(info: ModelInfo) -> Header:
    """What runs here, in words."""
    return {
        "version": __version__,
        "arithmetic": str(ARITHMETIC_VERSION),
        "model": info.name,
        "fingerprint": info.fingerprint,
        "numerics": info.numerics,
        "dtype": info.dtype,
        "device": info.device,
    }


def _plain(value: object) -> Any:
    """Maps with text keys, as the wire wants them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
