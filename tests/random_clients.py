"""Random operations of several clients against a plain record of every slot's tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_calls import admit_step
from latentd.attending import AttendRequest
from latentd.operations import (
    AttendDone,
    Failed,
    OpenDone,
    OpenRequest,
    SamplingParams,
    StepRequest,
    StreamRequest,
    StreamTokens,
    VerifyRequest,
)
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import num_pages
from random_attends import Attenders

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fakes import FakeEngine
    from latentd.engine_transfer import Arrival
    from latentd.operations import Event, StepRequest

NAMES = ("open", "fork", "step", "stream", "verify", "credit", "truncate", "close", "cancel",
         "export", "adopt", "attend", "launch", "run")  # fmt: skip
"""What `Clients.act` does."""
NEED_IDLE = ("export", "fork", "step", "stream", "truncate", "verify")


@dataclass
class Record:
    """What a client knows: its tokens, its slot, the last sampled token, and what runs."""

    tokens: list[int]
    seat: tuple[int, int]
    sampled: int | None = None
    running: OpenRequest | StepRequest | StreamRequest | VerifyRequest | None = None
    appended: int = 0  # by the step that runs
    named: int | None = None  # the first token of the stream that runs


@dataclass
class Clients:
    """Random clients of one engine, who check every token they get."""

    engine: FakeEngine
    live: list[Record] = field(default_factory=list)
    arriving: list[tuple[Arrival, NDArray[np.uint8], Record]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attenders = Attenders(self.engine)

    def act(self, name: str, who: int, number: int) -> None:
        """One operation; it may be refused."""
        engine = self.engine
        if name == "launch":
            engine.launch()
            return
        if name == "run":
            for event in engine.run():
                self.take(event)
            return
        with suppress(RequestRejected):
            if name == "open":
                prompt = [(number % 3 + n) % 256 for n in range(number % 300)]
                request = engine.admit_open(prompt, SamplingParams(), False, "ab"[number % 2])
                seat = request.slot_id, request.epoch
                self.live.append(Record(prompt, seat, running=request))
                return
            if name == "attend":
                self.attenders.act(who, number)
                return
            if name == "adopt" and self.arriving:
                self.end_adoption(who, number)
            if not self.live:
                return
            record = self.live[who % len(self.live)]
            seat = record.seat
            pos = len(record.tokens)
            is_unknown = isinstance(record.running, OpenRequest | StreamRequest)
            if is_unknown and not engine.slot(*seat).busy and name in NEED_IDLE:
                return  # the event of its end is on its way: the server would not let it through
            if name == "step":
                record.running = admit_step(engine, *seat, pos, number % 256)
                record.appended = number % 256
            elif name == "stream":
                stop = frozenset({number % 256})
                stream = StreamRequest(*seat, pos, 20, stop, number % 9)
                token = None if number % 2 else number % 256
                record.running = engine.admit_stream(stream, token, None)
                record.named = token
            elif name == "verify":
                draft = self.guess(record, number % 5) if record.sampled is not None else ()
                verify = VerifyRequest(*seat, pos, draft, frozenset())
                record.running, record.named = engine.admit_verify(verify, None, None), None
            elif name == "credit" and isinstance(record.running, StreamRequest):
                engine.add_credit(record.running, number % 5)
            elif name == "truncate":
                del record.tokens[engine.truncate(*seat, pos, number) :]
                record.sampled = None
            elif name == "fork":
                state = engine.fork(*seat, pos, None)
                assert (state.context_len, state.token) == (pos, record.sampled)
                fork = Record(list(record.tokens), (state.slot_id, state.epoch), record.sampled)
                self.live.append(fork)
            elif name == "export":
                self.begin_adoption(record, number)
            elif name == "close":
                engine.close(*seat)
                self.live.remove(record)
            elif name == "cancel" and record.running is not None:
                engine.cancel(record.running, "deadline" if number % 3 else "cancelled")

    def move(self, engine: FakeEngine) -> None:
        """Go on with an engine that holds what theirs did."""
        self.engine = self.attenders.engine = engine
        self.attenders.forget_what_lies_ahead()

    def begin_adoption(self, record: Record, number: int) -> None:
        """Take the pages out of a slot, and a seat for them."""
        transfers, pos = self.engine.transfers, len(record.tokens)
        data = transfers.read(transfers.look(*record.seat, pos), 0, num_pages(pos))
        salt = ("", "a", "b")[number % 3]
        arrival = transfers.begin(record.tokens[:], record.sampled, SamplingParams(), salt)
        copy = Record(record.tokens[:], (-1, 0), record.sampled)
        self.arriving.append((arrival, data, copy))

    def end_adoption(self, who: int, number: int) -> None:
        """Give one up, or bring all its pages, the last one first, and make the slot."""
        arrival, data, copy = self.arriving.pop(who % len(self.arriving))
        transfers = self.engine.transfers
        if number % 4 == 0:
            transfers.drop(arrival)
            return
        for first in reversed(range(len(data))):
            transfers.put(arrival, first, data[first : first + 1])
        slot = transfers.commit(arrival)
        copy.seat = slot.slot_id, slot.epoch
        self.live.append(copy)

    def guess(self, record: Record, right: int) -> tuple[int, ...]:
        """So many tokens that will be sampled, and a wrong one."""
        assert record.sampled is not None
        tokens = [*record.tokens, record.sampled]
        for _ in range(right + 1):
            tokens.append(self.engine.expected_token(tokens))
        return (*tokens[len(record.tokens) + 1 : -1], (tokens[-1] + 1) % 256)

    def take(self, event: Event) -> None:
        """Check an event against the record of its slot, if that is still open."""
        if isinstance(event, AttendDone) or isinstance(event.request, AttendRequest):
            self.attenders.take(event)
            return
        record = next((r for r in self.live if r.running is event.request), None)
        if record is None:
            return
        if isinstance(event, Failed):
            record.running = None
            if isinstance(event.request, OpenRequest):
                self.live.remove(record)
            return
        is_one = isinstance(event, OpenDone | StepRequest)
        tokens = [event.token] if isinstance(event, OpenDone | StepRequest) else event.tokens
        for token in tokens:
            if not is_one:
                token_in = record.sampled if record.named is None else record.named
                assert token_in is not None
                record.tokens.append(token_in)
                record.named = None
            elif isinstance(event, StepRequest):
                record.tokens.append(record.appended)
            assert token == (self.engine.expected_token(record.tokens) if record.tokens else None)
            record.sampled = token
        assert event.context_len == len(record.tokens)
        if not isinstance(event, StreamTokens) or event.end is not None:
            record.running = None
            slot = self.engine.slots.slots[record.seat[0]]
            assert slot.tokens[: len(record.tokens)].tolist() == record.tokens


def check(engine: FakeEngine) -> None:
    """Free, idle and used pages make up all, and the kept ones are those that can be found."""
    engine.slots.check()
    if engine.sharing.cache is not None:
        engine.sharing.cache.check()
    pool = engine.slots.pool
    unowned = len(pool.free_pages()) + pool.num_idle + pool.num_waiting
    assert pool.num_used + unowned == pool.num_pages


def finish(clients: Clients) -> None:
    """Run what is left, close every slot, and find all pages free or idle."""
    engine = clients.engine
    while engine.has_work:
        clients.act("run", 0, 0)
    seats = [record.seat for record in clients.live]
    for seat in [*seats, *(held.seat for held in clients.attenders.live)]:
        engine.close(*seat)
    for arrival, _, _ in clients.arriving:
        engine.transfers.drop(arrival)
    check(engine)
    assert engine.stats()["kv_pages_used"] == engine.stats()["slots_used"] == 0
