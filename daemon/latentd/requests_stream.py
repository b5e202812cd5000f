"""Handlers of streams: start one, give it to a new reader, grant it credit.

Exactly once, as in `requests_admit`: the same request again reads the same stream from its first
token on, `resume` from where its reader stands.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from latentd.operations import StreamRequest
from latentd.requests_admit import RETRY_AFTER_S, check_idle, read_sampling
from latentd.requests_extras import read_extras
from latentd.runs import StreamRun
from latentd.waiting import Place
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.records import SlotRecord
    from latentd.session import Session
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def stream(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Start a stream, or give the same one to a new reader from its first token on."""
    session = work.renew(header["session"], peer)
    record = session.record(header["slot"], header["epoch"])
    pos, credit, token = header["pos"], header["credit"], header.get("token")
    _check_credit(work, credit)
    stop = frozenset(header.get("stop") or ())
    sequences = tuple(sorted(set(map(tuple, header.get("stop_sequences") or ()))))
    sampling = read_sampling(header)
    extras = read_extras(header, raw, work.engine.info.vocab_size)
    digest = ("stream", header["max_steps"], stop, sequences, token, sampling, extras)
    running, expires_at = record.running, work.expires_at(header.get("deadline_s"))
    if isinstance(running, StreamRun) and running.pos == pos and running.digest == digest:
        running.expires_at = max(running.expires_at, expires_at)
        _attach(work, running, peer, request_id, credit, 0)
        return None
    request = StreamRequest(
        record.slot_id, record.epoch, pos, header["max_steps"], stop, credit, sequences, extras
    )
    start = partial(work.engine.admit_stream, request, token, sampling)
    run = StreamRun(session, record, request, pos, digest, peer, request_id, credit)
    run.expires_at, run.context_len = expires_at, pos
    try:
        check_idle(record)
        session.check_id(request_id)
        work.check_launch(header.get("deadline_s"))
        _check_left(work, session, credit)
        work.runs[start()] = run
    except RequestRejected as refusal:
        stored = record.find(pos, digest)
        if stored is not None:
            _replay(work, session, stored.results["run"], peer, request_id, 0)
            return None
        work.waiting.enter(Place(run, start, refusal))
    record.running = session.running[request_id] = run
    return None


def resume_stream(
    work: Work, session: Session, peer: bytes, request_id: int, header: Header
) -> None:
    """Give the slot's stream to a new reader that has it up to the length `pos`."""
    record = session.record(header["slot"], header["epoch"])
    pos, credit = header["pos"], header["credit"]
    _check_credit(work, credit)
    run = _find(record, pos)
    if run is None:
        state = work.engine.slot(record.slot_id, record.epoch)
        raise RequestRejected(
            "position_conflict",
            f"no stream of slot {record.slot_id} that is kept was at length {pos}; the slot has "
            f"{state.context_len} tokens",
            context_len=state.context_len,
        )
    if run.end is None:
        _attach(work, run, peer, request_id, credit, pos - run.pos)
    else:
        _replay(work, session, run, peer, request_id, pos - run.pos)


def _find(record: SlotRecord, pos: int) -> StreamRun | None:
    """The stream that runs, or the newest of those kept, with a reader at that length."""
    runs = [record.running, *(stored.results.get("run") for stored in record.newest())]
    for run in runs:
        if isinstance(run, StreamRun) and 0 <= pos - run.pos <= len(run.tokens):
            return run
    return None


def credit(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Let a stream go on; a stream that has ended needs none."""
    session = work.renew(header["session"], peer)
    run = session.running.get(header["stream"])
    if not isinstance(run, StreamRun) or run.end is not None:
        return {"known": False}
    room = work.options.credits - run.ahead
    n = min(header["n"], room, _credits_left(work, session))
    if n > 0:
        run.granted += n
        work.engine.add_credit(run.request, n)
    return {"known": True, "credit": run.ahead}


def _check_credit(work: Work, credit: int) -> None:
    if credit > work.options.credits:
        raise RequestRejected("invalid", f"stream: credit {credit}, at most {work.options.credits}")


def _credits_left(work: Work, session: Session) -> int:
    """What a stream may still be granted beside the others of its session."""
    most, running = work.options.shared_credits, session.running.values()
    if (len(running) + 1) * work.options.credits <= most:  # whatever the others have
        return work.options.credits
    streams = (run for run in running if isinstance(run, StreamRun) and run.end is None)
    return most - sum(run.ahead for run in streams)


def _check_left(work: Work, session: Session, credit: int) -> None:
    left = _credits_left(work, session)
    if credit > left:
        raise RequestRejected(
            "busy",
            f"stream: credit {credit}, and {left} of the {work.options.shared_credits} that all "
            "streams of a session may have together are left: read them, or ask for less",
            credits_left=max(0, left), retry_after_s=RETRY_AFTER_S,
        )  # fmt: skip


def _attach(
    work: Work, run: StreamRun, peer: bytes, request_id: int, credit: int, start: int
) -> None:
    """A running stream's new reader gets the tokens from `start` on, and credit beyond those there
    are as it asked."""
    run.session.check_id(request_id, run)
    missing = len(run.tokens) + credit - run.granted
    _check_left(work, run.session, missing)
    if not run.is_lost and (run.peer, run.request_id) != (peer, request_id):
        _dismiss(work, run)
    work.leave(run.session, run)
    run.peer, run.request_id, run.sent, run.replayed = peer, request_id, start, len(run.tokens)
    work.outbox.counters["replayed"] += 1
    run.session.running[request_id] = run
    run.is_lost = False
    if missing > 0:
        run.granted += missing
        work.engine.add_credit(run.request, missing)
    if len(run.tokens) > start:
        work.deliver(run)


def _replay(
    work: Work, session: Session, old: StreamRun, peer: bytes, request_id: int, start: int
) -> None:
    """Send an ended stream again, and no more to a reader that has not got all of it yet."""
    for other in [run for run in work.undelivered if run.record is old.record]:
        del work.undelivered[other]
        _dismiss(work, other)
        work.leave(other.session, other)
    run = StreamRun(
        session, old.record, old.request, old.pos, old.digest, peer, request_id, old.granted,
        old.tokens, old.logprobs, old.tops, old.context_len, old.end, start, len(old.tokens),
    )  # fmt: skip
    work.deliver(run)


def _dismiss(work: Work, run: StreamRun) -> None:
    """Tell a stream's reader that no frame follows: its request gets a last reply too."""
    text = "another request goes on with this stream; its frames carry that one's id"
    work.outbox.refuse(run.peer, run.request_id, RequestRejected("cancelled", text))
