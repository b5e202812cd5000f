"""The sessions' part of a snapshot: who owns which slots, and the stored replies.

Plain dataclasses, so that nothing of a live session (connections, runs, its token) can slip in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latentd.extras import Top
from latentd.operations import StreamRequest
from latentd.records import OpenRecord, SlotRecord, Stored
from latentd.runs import StreamRun
from latentd.session import Session

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from latentd.records import Reply
    from latentd.sessions import Sessions


@dataclass
class SavedStream:
    """A stream that has ended. The likeliest tokens beside its own lie one behind the other,
    `top_counts` of them beside each."""

    pos: int
    granted: int
    tokens: list[int]
    logprobs: list[float]
    context_len: int
    end: str | None
    top_counts: list[int]
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass
class SavedReply:
    """A stored reply; that of a stream is its `stream`."""

    digest: Hashable
    results: dict[str, Any]
    tensors: dict[str, Any] | None
    stream: SavedStream | None


@dataclass
class SavedRecord:
    """A session's slot with its replies, each behind the position that it was sent for."""

    slot_id: int
    epoch: int
    is_closed: bool
    replies: list[tuple[int, SavedReply]]


@dataclass
class SavedSession:
    """A session, named by the hash of its token alone; `opens` are done, by key; `owner` may use
    it."""

    token_hash: bytes
    slots: list[SavedRecord]
    opens: dict[str, SavedReply]
    owner: str | None = None


KINDS = (SavedStream, SavedReply, SavedRecord, SavedSession)


def seats(sessions: Sessions) -> Iterator[tuple[int, int]]:
    """The open slots of all sessions."""
    for session in sessions:
        yield from (seat for seat, record in session.slots.items() if record.closed_at is None)


def take(session: Session) -> SavedSession:
    """What is saved of a session on which nothing runs."""
    records = [
        SavedRecord(
            record.slot_id, record.epoch, record.closed_at is not None,
            [(pos, _take_reply(stored)) for pos, stored in record.replies.items()],
        )
        for record in session.slots.values()
    ]  # fmt: skip
    opens = {
        key: _take_reply(opened.stored)
        for key, opened in session.opens.items()
        if opened.stored is not None
    }
    return SavedSession(session.token_hash, records, opens, session.owner)


def _take_reply(stored: Reply) -> SavedReply:
    results = dict(stored.results)
    run: StreamRun | None = results.pop("run", None)
    tensors = None if stored.tensors is None else dict(stored.tensors)
    return SavedReply(stored.digest, results, tensors, None if run is None else _take_stream(run))


def _take_stream(run: StreamRun) -> SavedStream:
    tops = run.tops
    return SavedStream(
        run.pos, run.granted, run.tokens, run.logprobs, run.context_len, run.end,
        [len(top.tokens) for top in tops], [token for top in tops for token in top.tokens],
        [logprob for top in tops for logprob in top.logprobs],
    )  # fmt: skip


def put_back(sessions: Sessions, saved: SavedSession, now: float) -> None:
    """Make a session of it, with a new lease. Closed slots are kept for a grace period again."""
    session = sessions.take_back(saved.token_hash, now)
    session.owner = saved.owner
    for old in saved.slots:
        record = session.add_slot(old.slot_id, old.epoch, "")
        for pos, reply in old.replies:
            record.replies[pos] = _put_reply(session, record, reply)
    for key, reply in saved.opens.items():
        stored = Stored(reply.digest, reply.results, reply.tensors)
        opened = session.opens[key] = OpenRecord(reply.digest, None, stored)
        if opened.seat in session.slots:
            session.slots[opened.seat].key = key
    for old in saved.slots:
        if old.is_closed:
            record = session.slots[old.slot_id, old.epoch]
            record.closed_at = now
            sessions.note_closed(session, record)


def _put_reply(session: Session, record: SlotRecord, reply: SavedReply) -> Stored:
    results = reply.results
    if reply.stream is not None:
        run = _put_stream(session, record, reply.digest, reply.stream)
        results = {**results, "run": run}
    return Stored(reply.digest, results, reply.tensors)


def _put_stream(
    session: Session, record: SlotRecord, digest: Hashable, saved: SavedStream
) -> StreamRun:
    """A stream that has ended and that nobody reads; its digest has what it was asked for."""
    assert isinstance(digest, tuple)
    _, max_steps, stop, sequences, _, _, extras = digest
    request = StreamRequest(
        record.slot_id, record.epoch, saved.pos, max_steps, stop, 0, sequences, extras
    )
    tops, first = [], 0
    for count in saved.top_counts:
        part = slice(first, first + count)
        tops.append(Top(saved.top_tokens[part], saved.top_logprobs[part]))
        first += count
    return StreamRun(
        session, record, request, saved.pos, digest, b"", 0, saved.granted, saved.tokens,
        saved.logprobs, tops, saved.context_len, saved.end, sent=len(saved.tokens), is_lost=True,
    )  # fmt: skip
