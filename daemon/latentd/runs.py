"""Operations in flight: who waits for them, and how a stream's tokens reach its reader."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from latentd.extras import top_fields
from latentd.operations import StepRequest
from latentd.records import Stored
from latentd.replies import step_fields
from latentd.routing import Sent
from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from latentd.attending import AttendRequest
    from latentd.extras import Top
    from latentd.operations import Request, StreamRequest
    from latentd.records import SlotRecord
    from latentd.replies import Outbox, RowsTicket, Tensors, Ticket
    from latentd.session import Session
    from latentd_client.protocol import Header

Waiter: TypeAlias = "tuple[Ticket | RowsTicket, int, bool]"
"""A reply that waits for a row: its ticket, the row's index there, whether it is a repetition."""

MAX_WAITERS = 16
"""Requests that wait for one row: a client that repeats a request in flight waits for its last
repetition only, and all of them are replies that the daemon will have to keep for it."""
MAX_FRAME_TOKENS = 4096
"""Tokens in one frame of a stream (only a late or repeated reader gets that many at once)."""
TOKEN_BYTES = 70
"""A token and its log-probability in the lists of a stream."""
MAX_FRAMES_EACH = 4
"""Frames of a stream in one turn: long ones with many likeliest tokens take a while to pack."""


@dataclass(eq=False, slots=True)
class StepRun(StepRequest):
    """A step in flight, and once it is done its own stored reply (see `records.Reply`).
    `expires_at` is its deadline: until it is launched it can still be dropped."""

    record: SlotRecord
    digest: Hashable
    waiters: list[Waiter]
    expires_at: float

    @property
    def results(self) -> Header:
        """The fields of its reply."""
        return step_fields(self.result, self.top)

    @property
    def tensors(self) -> Tensors | None:
        """The tensors of its reply."""
        return None if self.logits is None else {"logits": self.logits}

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return is_of_session(self.record, session)


@dataclass(eq=False, slots=True)
class VerifyRun:
    """A verification in flight. `expires_at`: as of a step."""

    record: SlotRecord
    pos: int
    digest: Hashable
    waiters: list[Waiter]
    expires_at: float

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return is_of_session(self.record, session)


@dataclass(eq=False, slots=True)
class OpenRun:
    """A prompt in flight. `start` admits it, and sets `request`. `expires_at` is its deadline:
    between chunks it can still be dropped. `asked_ns`: when it came."""

    session: Session
    request_id: int
    key: str
    start: Callable[[], Request]
    expires_at: float
    waiters: list[Waiter]
    request: Request | None = None
    asked_ns: int = field(default_factory=time.monotonic_ns)

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return self.session is session


@dataclass(eq=False, slots=True)
class SeatRun:
    """A fork or the begin of an adoption that waits for its slot; `source` is the slot that is to
    be forked, and busy meanwhile. `expires_at` is its deadline."""

    session: Session
    request_id: int
    key: str
    waiters: list[Waiter]
    expires_at: float
    source: SlotRecord | None = None

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return self.session is session


@dataclass(eq=False, slots=True)
class StreamRun:
    """A stream: all its tokens so far, and how many of them its reader was sent.

    `granted` counts the credit ever given; `end` is set with the last tokens; the first `replayed`
    tokens were produced for an earlier reader. `is_lost`: its reader is gone, it waits for another.
    `expires_at` is its deadline, as of a step.
    """

    session: Session
    record: SlotRecord
    request: StreamRequest
    pos: int
    digest: Hashable
    peer: bytes
    request_id: int
    granted: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)  # one a token, where they were asked for
    context_len: int = 0
    end: str | None = None
    sent: int = 0
    replayed: int = 0
    is_lost: bool = False
    expires_at: float = math.inf

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return self.session is session

    @property
    def ahead(self) -> int:
        """Credit that it has been granted and not used."""
        return self.granted - len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """About what its tokens take."""
        return TOKEN_BYTES * len(self.tokens) * (1 + self.request.extras.top)

    def close(self, end: str) -> None:
        """It has ended; what it has is kept for its repetition."""
        self.end = end
        self.record.running = None
        results = {"run": self, "context_len": self.context_len}
        self.record.store(self.pos, Stored(self.digest, results))

    def deliver(self, outbox: Outbox) -> Sent:
        """Send what the reader has not got yet. FULL: try again later."""
        frames = 0
        while self.sent < len(self.tokens) or self.end is not None:
            if frames == MAX_FRAMES_EACH or not outbox.has_room(self.peer):
                return Sent.FULL
            frames += 1
            most = MAX_FRAME_TOKENS // (1 + self.request.extras.top)  # a header has 1 MiB
            stop = min(len(self.tokens), self.sent + most)
            outcome = outbox.try_send(self.peer, protocol.encode(self._frame(stop)))
            if outcome is not Sent.YES:
                return outcome
            self.sent = stop
            if stop == len(self.tokens):
                break
        return Sent.YES

    def _frame(self, stop: int) -> Header:
        """The frame with the unsent tokens up to `stop`. `pos` is the slot's length after the
        first of them was sampled."""
        start = self.sent
        header: Header = {
            "v": protocol.VERSION,
            "id": self.request_id,
            "status": "ok",
            "pos": self.pos + 1 + start,
            "tokens": self.tokens[start:stop],
            "logprobs": self.logprobs[start:stop],
            "context_len": self.context_len,
        }
        if self.tops:
            header |= top_fields(self.tops[start:stop])
        if self.end is None or stop < len(self.tokens):
            header["more"] = True
        else:
            header["end"] = self.end
        if start < self.replayed:
            header["replayed"] = True
        return header


@dataclass(eq=False, slots=True)
class AttendRun:
    """Attention in flight, of all the slots of its request. `expires_at`: as of a step."""

    records: list[SlotRecord]
    request: AttendRequest
    waiters: list[Waiter]
    expires_at: float

    def is_in(self, session: Session) -> bool:
        """Whether it is of this session."""
        return is_of_session(self.records[0], session)


def is_of_session(record: SlotRecord, session: Session) -> bool:
    """Whether a slot is of a session."""
    return session.slots.get((record.slot_id, record.epoch)) is record


Run: TypeAlias = "StepRun | VerifyRun | OpenRun | SeatRun | StreamRun | AttendRun"
