"""Handlers of the requests that the engine has to run: open and stream (step has its own module).

Exactly once: a request that names the slot's true length runs; the same request again gets the
stored reply, or joins those who wait for the one in flight; any other is refused by the engine.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd.operations import SamplingParams
from latentd.replies import Ticket
from latentd.runs import MAX_WAITERS, OpenRun, StreamRun
from latentd.sessions import OpenRecord
from latentd_client import fields, protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from latentd.runs import StepRun, Waiter
    from latentd.sessions import Session, SlotRecord, Stored
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

RETRY_AFTER_S = 0.005
"""The hint given with `busy`: about the time of one step."""


def open_slot(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Start a prompt, or find the open of the same key."""
    session = work.renew(header["session"], peer)
    prompt = _read_prompt(header["prompt"], raw)
    sampling = read_sampling(header)
    logits = bool(header.get("logits"))
    digest = (_digest(prompt), sampling, logits)
    ticket = Ticket(work.outbox, peer, request_id)
    key = header["key"]
    record = session.opened(key, digest)
    if record is not None:
        if record.run is not None:
            join(record.run, (ticket, 0, True))
        elif record.stored is not None:
            ticket.put(0, record.stored.results, record.stored.logits, True)
        return None
    deadline_s = header.get("deadline_s")
    work.check_launch(deadline_s)
    request = work.engine.admit_open(prompt, sampling or SamplingParams(), logits)
    expires_at = math.inf if deadline_s is None else work.now + deadline_s
    run = OpenRun(session, request, request_id, key, expires_at, [(ticket, 0, False)])
    session.opens[key] = OpenRecord(digest, run)
    session.running[request_id] = work.runs[request] = run
    if deadline_s is not None:
        work.deadlines[run] = None
    return None


def stream(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Start a stream, or give the same one to a new reader from its first token on."""
    session = work.renew(header["session"], peer)
    record = session.record(header["slot"], header["epoch"])
    pos, max_steps, credit = header["pos"], header["max_steps"], header["credit"]
    stop = frozenset(header.get("stop") or ())
    sampling = read_sampling(header)
    if credit > work.options.credits:
        raise RequestRejected("invalid", f"stream: credit {credit}, at most {work.options.credits}")
    digest = ("stream", max_steps, stop, sampling)
    run = record.running
    if isinstance(run, StreamRun) and run.pos == pos and run.digest == digest:
        _attach(work, run, peer, request_id, credit)
        return None
    try:
        check_idle(record)
        work.check_launch(header.get("deadline_s"))
        request = work.engine.admit_stream(
            record.slot_id, record.epoch, pos, max_steps, stop, credit, sampling
        )
    except RequestRejected:
        stored = record.find(pos, digest)
        if stored is None:
            raise
        _replay(work, session, stored, peer, request_id)
        return None
    run = StreamRun(session, record, request, pos, digest, peer, request_id, credit)
    record.running = session.running[request_id] = work.runs[request] = run
    return None


def _attach(work: Work, run: StreamRun, peer: bytes, request_id: int, credit: int) -> None:
    """A running stream's new reader gets all tokens so far, and credit beyond them as it asked."""
    work.leave(run.session, run)
    run.peer, run.request_id, run.sent, run.replayed = peer, request_id, 0, len(run.tokens)
    run.session.running[request_id] = run
    missing = len(run.tokens) + credit - run.granted
    if missing > 0:
        run.granted += missing
        work.engine.add_credit(run.request, missing)
    if run.tokens:
        work.deliver(run)


def _replay(work: Work, session: Session, stored: Stored, peer: bytes, request_id: int) -> None:
    """Send an ended stream again, and no more to a reader that has not got all of it yet."""
    old: StreamRun = stored.results["run"]
    for other in [run for run in work.undelivered if run.record is old.record]:
        del work.undelivered[other]
        work.leave(other.session, other)
    run = StreamRun(
        session, old.record, old.request, old.pos, old.digest, peer, request_id, old.granted,
        old.tokens, old.logprobs, old.context_len, old.end, 0, len(old.tokens),
    )  # fmt: skip
    work.deliver(run)


def join(run: OpenRun | StepRun, waiter: Waiter) -> None:
    """Let a repeated request wait for the one in flight. Raises RequestRejected("busy")."""
    if len(run.waiters) >= MAX_WAITERS:
        raise RequestRejected(
            "busy", f"{MAX_WAITERS} requests wait for this very operation already",
            retry_after_s=RETRY_AFTER_S,
        )  # fmt: skip
    run.waiters.append(waiter)


def check_idle(record: SlotRecord) -> None:
    """Raise RequestRejected("busy") while an operation of the slot is in flight. What a close has
    ended is in flight no more, told or not: the engine refuses what comes after."""
    if record.running is not None and record.closed_at is None:
        raise RequestRejected(
            "busy", f"slot {record.slot_id} has an operation in flight; one at a time",
            retry_after_s=RETRY_AFTER_S,
        )  # fmt: skip


def read_sampling(header: Header) -> SamplingParams | None:
    """The sampling parameters of a request; their ranges are checked. None without any."""
    given = header.get("sampling")
    if given is None:
        return None
    names = (f.name for f in fields.SAMPLING)
    known: dict[str, Any] = {n: given[n] for n in names if given.get(n) is not None}
    sampling = SamplingParams(**known)
    sampling.validate()
    return sampling


def _read_prompt(value: object, raw: Sequence[Tensor]) -> list[int] | np.ndarray[Any, Any]:
    if isinstance(value, list):
        return value
    array = protocol.pick_raw(value, raw)
    if array is None or array.dtype != np.int32 or array.ndim != 1:
        raise RequestRejected("invalid", "open: field prompt must name a raw int32 frame [n]")
    return array


def _digest(prompt: list[int] | np.ndarray[Any, Any]) -> Hashable:
    """The same for the same ids, sent as a list or raw."""
    ids = np.asarray(prompt, np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
