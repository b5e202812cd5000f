"""The verify request: a draft that runs beside the slot's next token, in one step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from latentd.operations import VerifyRequest
from latentd.replies import Ticket
from latentd.requests_admit import check_idle, join, read_sampling
from latentd.requests_extras import read_extras
from latentd.runs import VerifyRun
from latentd.waiting import Place
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def verify(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Queue a draft, or find the same one's reply."""
    session = work.renew(header["session"], peer)
    record = session.record(header["slot"], header["epoch"])
    pos, token, draft = header["pos"], header.get("token"), tuple(header["draft"])
    stop, sampling = frozenset(header.get("stop") or ()), read_sampling(header)
    extras = read_extras(header, raw, work.engine.info.vocab_size)
    digest = ("verify", token, draft, stop, sampling, extras)
    ticket, running = Ticket(work.outbox, peer, request_id), record.running
    expires_at = work.expires_at(header.get("deadline_s"))
    if isinstance(running, VerifyRun) and running.pos == pos and running.digest == digest:
        join(running, (ticket, 0, True), expires_at)
        return None
    request = VerifyRequest(record.slot_id, record.epoch, pos, draft, stop, extras)
    start = partial(work.engine.admit_verify, request, token, sampling)
    run = VerifyRun(record, pos, digest, [(ticket, 0, False)], expires_at)
    try:
        check_idle(record)
        work.check_launch(header.get("deadline_s"))
        work.runs[start()] = run
    except RequestRejected as refusal:
        stored = record.find(pos, digest)
        if stored is not None:
            ticket.put(0, stored.results, stored.tensors, True)
            return None
        work.waiting.enter(Place(run, start, refusal))
    record.running = run
    return None
