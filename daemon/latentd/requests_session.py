"""Handlers of the requests that are answered at once: sessions, slots, cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.records import Stored
from latentd.requests_admit import check_idle
from latentd.requests_stream import resume_stream
from latentd_client import fields, protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.records import SlotRecord
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def hello(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Agree on a version and make a session."""
    lowest, highest = header["versions"]
    if not lowest <= protocol.VERSION <= highest:
        raise RequestRejected(
            "version",
            f"the client speaks versions {lowest} to {highest}, the daemon {protocol.VERSION}",
            versions=[protocol.VERSION, protocol.VERSION],
        )
    work.check_launch(None)
    work.access.check(work.outbox.router.who(peer))
    session = work.sessions.create(work.now)
    work.move(session, peer)
    return {"session": session.token, **_hello_fields(work)}


def _hello_fields(work: Work) -> Header:
    """What hello tells beside the session."""
    info, options = work.engine.info, work.options
    return {
        "version": protocol.VERSION,
        "boot_id": work.sessions.boot_id,
        "lease_s": options.lease_s,
        "control": work.control,
        "features": list(fields.ATTEND_FEATURES if info.attend_only else fields.FEATURES),
        "limits": {
            "max_frame_bytes": options.max_frame_bytes,
            "max_frames": options.max_frames,
            "credits": options.credits,
            "session_credits": options.shared_credits,
            "max_waiting": options.max_waiting,
        },
        "model": {
            "name": info.name,
            "fingerprint": info.fingerprint,
            "vocab_size": info.vocab_size,
            "eos_token_ids": list(info.eos_token_ids),
            "layers": info.layers,
            "heads": info.heads,
            "nope_dim": info.nope_dim,
            "v_dim": info.v_dim,
            "tokenizer": info.tokenizer,
        },
        "max_ctx": info.max_ctx,
        "max_slots": info.max_slots,
        "buckets": list(info.buckets),
        "page_size": info.page_size,
        "numerics": info.numerics,
        "dtype": info.dtype,
        "device": info.device,
        "attend_only": info.attend_only,
    }


def resume(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Renew the lease and tell what the session has; or with a slot go on with its stream."""
    session = work.renew(header["session"], peer)
    if any(header.get(name) is not None for name in ("slot", "epoch", "pos", "credit")):
        if any(header.get(name) is None for name in ("slot", "epoch", "pos", "credit")):
            raise RequestRejected("invalid", "resume: slot, epoch, pos and credit go together")
        resume_stream(work, session, peer, request_id, header)
        return None
    slots = []
    for record in session.slots.values():
        if record.closed_at is None:
            state = work.engine.slot(record.slot_id, record.epoch)
            slots.append(
                {
                    "slot": record.slot_id,
                    "epoch": record.epoch,
                    "context_len": state.context_len,
                    "token": state.token,
                    "busy": record.running is not None,
                }
            )
    sessions = work.sessions
    return {"boot_id": sessions.boot_id, "lease_s": sessions.lease_s, "slots": slots}


def ping(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Answer; renew the lease of the session, if one is named."""
    if header.get("session") is not None:
        work.renew(header["session"], peer)
    return {}


def cancel(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Stop an open or a stream; its own last reply still comes."""
    session = work.renew(header["session"], peer)
    return {"known": work.cancel(session, header["request"])}


def truncate(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Drop the tokens from a position on."""
    session = work.renew(header["session"], peer)
    record = session.record(header["slot"], header["epoch"])
    pos, to = header["pos"], header["to"]
    digest = ("truncate", to)
    try:
        check_idle(record)
        length = work.engine.truncate(record.slot_id, record.epoch, pos, to)
    except RequestRejected as refusal:
        stored = record.find(pos, digest)
        if stored is None or _is_new(work, record, pos, refusal):
            raise
        return {**stored.results, "replayed": True}
    work.let_in()
    record.forget_beyond(to)
    results: Header = {"context_len": length}
    record.store(pos, Stored(digest, results))
    return results


def _is_new(work: Work, record: SlotRecord, pos: int, refusal: RequestRejected) -> bool:
    """Whether what was refused is no repetition: the slot has grown to that length again."""
    if refusal.code != "busy":
        return False
    return work.engine.slot(record.slot_id, record.epoch).context_len == pos


def close(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Free a slot, or with no slot named everything the session has, and the session."""
    slot_id, epoch = header.get("slot"), header.get("epoch")
    is_whole = slot_id is None and epoch is None
    if is_whole and work.sessions.has_ended(header["session"]):
        return {"replayed": True}
    session = work.renew(header["session"], peer)
    if is_whole:
        work.end_session(session)
        work.sessions.note_ended(session.token_hash, work.now)
        return {}
    if slot_id is None or epoch is None:
        raise RequestRejected("invalid", "close: slot and epoch go together")
    record = session.record(slot_id, epoch)
    if record.closed_at is not None:
        return {"replayed": True}
    work.close_slot(record)
    work.sessions.note_closed(session, record)
    return {}
