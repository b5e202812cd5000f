"""The handler of open, and what it shares with those of step and stream, which have own modules.

Exactly once: a request that names the slot's true length runs; the same request again gets the
stored reply, or joins those who wait for the one in flight; any other is refused by the engine.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd.operations import SamplingParams
from latentd.replies import Ticket
from latentd.requests_extras import check_scores, read_extras
from latentd.runs import MAX_WAITERS, OpenRun
from latentd.runs_waiting import begin_open
from latentd_client import fields, protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.records import SlotRecord
    from latentd.runs import AttendRun, SeatRun, StepRun, VerifyRun, Waiter
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

RETRY_AFTER_S = 0.005
"""The hint given with `busy`: about the time of one step."""


def open_slot(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Start a prompt, or find the open of the same key."""
    session = work.renew(header["session"], peer)
    prompt = np.array(read_ids("open: field prompt", header["prompt"], raw), np.int32)
    sampling = read_sampling(header)
    vocab, prompt_top = work.engine.info.vocab_size, header.get("prompt_logprobs")
    extras = read_extras(header, raw, vocab, prompt_top)
    check_scores(extras, len(prompt), work.options.max_frame_bytes)
    logits = bool(header.get("logits"))
    salt = header.get("salt") or ""
    ids_digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
    digest = (ids_digest, sampling, logits, salt, extras)
    ticket = Ticket(work.outbox, peer, request_id)
    key = header["key"]
    record = session.opened(key, digest)
    if record is not None:
        if record.run is not None:
            join(record.run, (ticket, 0, True), work.expires_at(header.get("deadline_s")))
        elif record.stored is not None:
            ticket.put(0, record.stored.results, record.stored.tensors, True)
        return None
    deadline_s = header.get("deadline_s")
    work.check_launch(deadline_s)
    session.check_seat(work.options.session_slots)
    sampling = sampling or SamplingParams()
    if work.waiting.has_new:
        work.engine.check_open(prompt, sampling)
    start = partial(work.engine.admit_open, prompt, sampling, logits, salt, extras)
    expires_at = work.expires_at(deadline_s)
    run = OpenRun(session, request_id, key, start, expires_at, [(ticket, 0, False)])
    begin_open(work, run, digest, prompt.nbytes)
    return None


def join(
    run: OpenRun | SeatRun | StepRun | VerifyRun | AttendRun, waiter: Waiter, expires_at: float
) -> None:
    """Let a repeated request wait for the one in flight, which has its time too. Raises
    RequestRejected("busy")."""
    if len(run.waiters) >= MAX_WAITERS:
        raise RequestRejected(
            "busy", f"{MAX_WAITERS} requests wait for this very operation already",
            retry_after_s=RETRY_AFTER_S,
        )  # fmt: skip
    run.waiters.append(waiter)
    run.expires_at = max(run.expires_at, expires_at)


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


def read_ids(what: str, value: object, raw: Sequence[Tensor]) -> list[int] | np.ndarray[Any, Any]:
    """Token ids, given as a list or as a raw frame."""
    if isinstance(value, list):
        return value
    array = protocol.pick_raw(value, raw)
    if array is None or array.dtype != np.int32 or array.ndim != 1:
        raise RequestRejected("invalid", f"{what} must name a raw int32 frame [n]")
    return array
