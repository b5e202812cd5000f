"""Runs that wait for room: how they come to wait, begin, and are turned away."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from latentd.records import OpenRecord
from latentd.runs import OpenRun, SeatRun, StreamRun
from latentd.waiting import Place
from latentd_client.errors import RequestRejected
from latentd_client.fields import MAX_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from latentd.operations import Request
    from latentd.runs import Run
    from latentd.session import Session
    from latentd.work import Work
    from latentd_client.protocol import Header

ENDS: Final = {"cancelled": "cancelled", "draining": "draining", "epoch_gone": "closed"}
"""How a stream ends that is turned away with a code, whether it has begun or not."""


def begin_open(work: Work, run: OpenRun, digest: Hashable, size: int) -> None:
    """Start a prompt, which keeps `size` bytes, or let it wait behind those that do, under its key.
    Raises RequestRejected."""
    run.session.check_id(run.request_id)
    try:
        work.waiting.check_turn()
        _begin(work, run, run.start())
    except RequestRejected as refusal:
        work.waiting.enter(Place(run, run.start, refusal, is_new=True, size=size))
    _note(run, digest)
    if run in work.waiting:
        let_in(work)


def seat_or_wait(
    work: Work, run: SeatRun, digest: Hashable, start: Callable[[], Header], size: int = 0
) -> Header | None:
    """What `start` gives, which takes a seat; or None when the run waits for it, with what it keeps
    in bytes, under its key. Raises RequestRejected."""
    try:
        work.waiting.check_turn()
        return start()
    except RequestRejected as refusal:
        run.session.check_id(run.request_id)
        work.waiting.enter(Place(run, start, refusal, is_new=True, size=size))
    _note(run, digest)
    if run.source is not None:
        run.source.running = run
    let_in(work)
    return None


def _note(run: OpenRun | SeatRun, digest: Hashable) -> None:
    """It can be found by its key and by its request's id."""
    run.session.opens[run.key] = OpenRecord(digest, run)
    run.session.running[run.request_id] = run


def park(work: Work, run: StreamRun) -> bool:
    """Let a stream wait that has met a full pool: it goes on where it stands. False where nobody
    waits."""
    if not work.waiting.most:
        return False
    old = run.request
    left = old.max_steps - (run.context_len - old.pos)
    tail = tuple(run.tokens[1 - MAX_SEQUENCE :])  # a stop sequence may have begun in it
    request = run.request = replace(old, pos=run.context_len, max_steps=left, before=tail)
    start = partial(work.engine.admit_stream, request, None, None)
    full = RequestRejected("no_pages", "the pool is full", pages_needed=1)
    return _wait_on(work, Place(run, start, full, has_run=True))


def put_back(work: Work, run: OpenRun, refusal: RequestRejected) -> bool:
    """Let a prompt wait that has met a full pool: it begins anew. False where nobody waits."""
    return _wait_on(work, Place(run, run.start, refusal, is_new=True, has_run=True))


def _wait_on(work: Work, place: Place) -> bool:
    if work.is_draining:
        return False
    try:
        work.waiting.enter(place)
    except RequestRejected:
        return False
    return True


def let_in(work: Work) -> None:
    """Start those who have room now."""
    for run, outcome in work.waiting.retry(lambda: work.engine.room, work.now):
        if isinstance(outcome, RequestRejected):
            work.fail(run, outcome)
        elif isinstance(outcome, dict):
            _answer(work, run, outcome)
        else:
            _begin(work, run, outcome)


def _begin(work: Work, run: Run, request: Request) -> None:
    work.runs[request] = run
    if isinstance(run, OpenRun):
        run.request = request


def _answer(work: Work, run: Run, results: Header) -> None:
    """A fork or an adoption has its seat."""
    assert isinstance(run, SeatRun)
    work.leave(run.session, run)
    if run.source is not None:
        run.source.running = None
    for ticket, index, replayed in run.waiters:
        ticket.put(index, {"status": "ok", **results}, None, replayed)


def turn_away(work: Work, run: Run, refusal: RequestRejected) -> None:
    """End a run that waits. A stream keeps the tokens it has."""
    if not work.waiting.leave(run):
        return
    end = ENDS.get(refusal.code)
    if isinstance(run, StreamRun) and (run.tokens or end is not None):
        run.close(end or refusal.code)
        work.deliver(run)
    else:
        work.fail(run, refusal)


def turn_all_away(work: Work, refusal: RequestRejected, session: Session | None = None) -> None:
    """The same for all who wait, or for those of a session."""
    for run in work.waiting:
        if session is None or run.is_in(session):
            turn_away(work, run, refusal)


def break_stall(work: Work) -> None:
    """Turn the newest away where all open slots wait for pages that only they could give back."""
    waiting, engine = work.waiting, work.engine
    if not waiting.num_old or engine.has_work:
        return
    if waiting.num_old >= engine.info.max_slots - engine.room.slots:
        newest = waiting.newest_old
        turn_away(work, newest.run, newest.refusal)
