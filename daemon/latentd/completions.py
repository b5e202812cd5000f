"""What happens when the engine has completed something: records change, replies go out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from latentd.extras import top_fields
from latentd.operations import AttendDone, Failed, OpenDone, StreamTokens, VerifyDone
from latentd.records import Stored
from latentd.replies import logits_tensor
from latentd.runs import AttendRun, OpenRun, StepRun, StreamRun, VerifyRun
from latentd.runs_waiting import park, put_back
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.operations import Event
    from latentd.work import Work
    from latentd_client.protocol import Header


def complete(work: Work, events: list[Event]) -> None:
    """Commit what the engine has completed and answer those who wait for it. The replies of steps
    leave before any record is kept: somebody counts the microseconds."""
    runs = work.runs
    done: list[StepRun] = []
    streams: dict[StreamRun, None] = {}
    for event in events:
        if not isinstance(event, StepRun):
            _complete_other(work, event, streams)
        elif runs.pop(event, None) is not None:
            done.append(event)
    _answer(done)
    for stream in streams:  # once for all that has come of it
        work.deliver(stream)
    for run in done:
        record = run.record
        record.running = None
        record.store(run.pos, run)
        run.waiters.clear()


def _answer(steps: list[StepRun]) -> None:
    for run in steps:
        is_plain = run.top is None and run.logits is None
        for ticket, index, replayed in run.waiters:
            if is_plain and not replayed:
                ticket.put_plain(index, run.result)
            else:
                ticket.put(index, run.results, run.tensors, replayed)


def _complete_other(work: Work, event: Event, streams: dict[StreamRun, None]) -> None:
    run = work.runs.get(event.request)
    if isinstance(event, StreamTokens):
        if isinstance(run, StreamRun):
            _stream_tokens(work, run, event)
            streams[run] = None
    elif isinstance(event, OpenDone):
        if isinstance(run, OpenRun):
            _open_done(work, run, event)
    elif isinstance(event, VerifyDone):
        if isinstance(run, VerifyRun):
            _verify_done(work, run, event)
    elif isinstance(event, AttendDone):
        if isinstance(run, AttendRun):
            _attend_done(work, run, event)
    elif isinstance(event, Failed) and run is not None:
        _failed(work, event)


def _open_done(work: Work, run: OpenRun, event: OpenDone) -> None:
    session, request = run.session, event.request
    del work.runs[request]
    work.leave(session, run)
    if session.is_gone:  # it ended while the last chunk ran
        work.engine.close(request.slot_id, request.epoch)
        refuse = RequestRejected("cancelled", "the session has ended")
        work.refuse(run, refuse)
        return
    session.add_slot(request.slot_id, request.epoch, run.key)
    if event.token is not None:
        work.first_token.add(time.monotonic_ns() - run.asked_ns)
    results: Header = {
        "status": "ok",
        "slot": request.slot_id,
        "epoch": request.epoch,
        "context_len": event.context_len,
        "token": event.token,
        "logprob": event.logprob,
        "cached_tokens": request.cached_tokens,
        "seed": request.sampling.seed,
    }
    if event.top is not None:
        results |= event.top.fields()
    tensors = logits_tensor(event.logits)
    if event.prompt_scores is not None:
        tensors = {**(tensors or {}), **event.prompt_scores.tensors()}
    opened = session.opens[run.key]
    opened.run = None
    opened.stored = Stored(opened.digest, results, tensors)
    for ticket, index, replayed in run.waiters:
        ticket.put(index, results, tensors, replayed)


def _verify_done(work: Work, run: VerifyRun, event: VerifyDone) -> None:
    del work.runs[event.request]
    run.record.running = None
    results: Header = {
        "status": "ok",
        "accepted": len(event.tokens) - 1,
        "tokens": event.tokens,
        "token": event.tokens[-1],
        "logprobs": event.logprobs,
        "context_len": event.context_len,
    }
    if event.tops:
        results |= top_fields(event.tops)
    run.record.store(run.pos, Stored(run.digest, results))
    for ticket, index, replayed in run.waiters:
        ticket.put(index, results, None, replayed)


def _attend_done(work: Work, run: AttendRun, event: AttendDone) -> None:
    del work.runs[event.request]
    for record in run.records:
        record.running = None
    results: Header = {"status": "ok", "context_len": event.lengths}
    for ticket, index, replayed in run.waiters:
        ticket.put(index, results, {"o": event.o}, replayed)


def _stream_tokens(work: Work, run: StreamRun, event: StreamTokens) -> None:
    run.tokens += event.tokens
    run.logprobs += event.logprobs
    run.tops += event.tops
    run.context_len = event.context_len
    if event.end is not None:
        del work.runs[event.request]
        if event.end != "no_pages" or not park(work, run):
            run.close(event.end)


def _failed(work: Work, event: Failed) -> None:
    run = work.runs.pop(event.request)
    refusal = RequestRejected(event.code, event.message, **event.detail)
    if not isinstance(run, OpenRun) or event.code != "no_pages" or not put_back(work, run, refusal):
        work.fail(run, refusal)
