"""The fork request: a new slot with the tokens of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.requests_admit import check_idle, read_sampling
from latentd.sessions import OpenRecord, Stored

if TYPE_CHECKING:
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def fork(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Make a slot of another one, or find the fork of the same key."""
    session = work.renew(header["session"], peer)
    slot_id, epoch, pos, key = header["slot"], header["epoch"], header["pos"], header["key"]
    sampling = read_sampling(header)
    digest = ("fork", slot_id, epoch, pos, sampling)
    known = session.opened(key, digest)
    if known is not None and known.stored is not None:
        return {**known.stored.results, "replayed": True}
    source = session.record(slot_id, epoch)
    check_idle(source)
    work.check_launch(None)
    work.waiting.check_turn()
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
