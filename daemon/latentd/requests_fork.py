"""The fork request: a new slot with the tokens of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.records import OpenRecord, Stored
from latentd.replies import Ticket
from latentd.requests_admit import check_idle, join, read_sampling
from latentd.runs import SeatRun
from latentd.runs_waiting import seat_or_wait

if TYPE_CHECKING:
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def fork(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Make a slot of another one, or find the fork of the same key."""
    session = work.renew(header["session"], peer)
    slot_id, epoch, pos, key = header["slot"], header["epoch"], header["pos"], header["key"]
    sampling, deadline_s = read_sampling(header), header.get("deadline_s")
    digest = ("fork", slot_id, epoch, pos, sampling)
    ticket, expires_at = Ticket(work.outbox, peer, request_id), work.expires_at(deadline_s)
    known = session.opened(key, digest)
    if known is not None and known.stored is not None:
        return {**known.stored.results, "replayed": True}
    if known is not None and known.run is not None:
        join(known.run, (ticket, 0, True), expires_at)
        return None
    source = session.record(slot_id, epoch)
    check_idle(source)
    work.check_launch(deadline_s)
    session.check_seat(work.options.session_slots)
    if work.waiting.has_new:
        work.engine.transfers.look(slot_id, epoch, pos)

    def start() -> Header:
        forked = work.engine.fork(slot_id, epoch, pos, sampling)
        results: Header = {
            "slot": forked.slot_id,
            "epoch": forked.epoch,
            "context_len": forked.context_len,
            "token": forked.token,
            "seed": forked.seed,
        }
        session.add_slot(forked.slot_id, forked.epoch, key)
        session.opens[key] = OpenRecord(digest, None, Stored(digest, results))
        return results

    run = SeatRun(session, request_id, key, [(ticket, 0, False)], expires_at, source)
    return seat_or_wait(work, run, digest, start)
