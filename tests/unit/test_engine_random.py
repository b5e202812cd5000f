"""Random operations of several clients against a plain record of every slot's tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from latentd.memory import step_layout
from latentd.operations import (
    Failed,
    OpenRequest,
    SamplingParams,
    StepDone,
    StreamRequest,
    StreamTokens,
)
from latentd.options import EngineOptions
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.operations import Event, StepRequest

NAMES = ("open", "fork", "step", "stream", "credit", "truncate", "close", "cancel", "launch", "run",
         "run")  # fmt: skip
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 400)), max_size=60
)


@dataclass
class Record:
    """What a client knows: its tokens, its slot, the last sampled token, and what runs."""

    tokens: list[int]
    seat: tuple[int, int]
    sampled: int | None = None
    running: OpenRequest | StepRequest | StreamRequest | None = None
    appended: int = 0  # by the step that runs
    named: int | None = None  # the first token of the stream that runs


@dataclass
class Clients:
    """Random clients of one engine, who check every token they get."""

    engine: FakeEngine
    live: list[Record] = field(default_factory=list)

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
                prompt = [(number + n) % 256 for n in range(number % 300)]
                request = engine.admit_open(prompt, SamplingParams(), False)
                seat = request.slot_id, request.epoch
                self.live.append(Record(prompt, seat, running=request))
                return
            if not self.live:
                return
            record = self.live[who % len(self.live)]
            seat = record.seat
            pos = len(record.tokens)
            is_unknown = isinstance(record.running, OpenRequest) and not engine.slot(*seat).busy
            if is_unknown and name in ("fork", "step", "stream", "truncate"):
                return  # the open's event is on its way: no client could name the slot yet
            if name == "step":
                record.running = engine.admit_step(*seat, pos, number % 256, None, False)
                record.appended = number % 256
            elif name == "stream":
                stop = frozenset({number % 256})
                stream = StreamRequest(*seat, pos, 20, stop, number % 9)
                token = None if number % 2 else number % 256
                record.running = engine.admit_stream(stream, token, None)
                record.named = token
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
            elif name == "close":
                engine.close(*seat)
                self.live.remove(record)
            elif name == "cancel" and isinstance(record.running, OpenRequest | StreamRequest):
                engine.cancel(record.running)

    def take(self, event: Event) -> None:
        """Check an event against the record of its slot, if that is still open."""
        record = next((r for r in self.live if r.running is event.request), None)
        if record is None:
            return
        if isinstance(event, Failed):
            record.running = None
            if isinstance(event.request, OpenRequest):
                self.live.remove(record)
            return
        tokens = event.tokens if isinstance(event, StreamTokens) else [event.token]
        for token in tokens:
            if isinstance(event, StreamTokens):
                token_in = record.sampled if record.named is None else record.named
                assert token_in is not None
                record.tokens.append(token_in)
                record.named = None
            elif isinstance(event, StepDone):
                record.tokens.append(record.appended)
            assert token == (self.engine.expected_token(record.tokens) if record.tokens else None)
            record.sampled = token
        assert event.context_len == len(record.tokens)
        if not isinstance(event, StreamTokens) or event.end is not None:
            record.running = None


@given(operations=OPERATIONS, pages=st.integers(5, 14), chunk=st.sampled_from([16, 100]))
@settings(max_examples=120, deadline=None)
def test_random_clients_get_the_tokens_of_their_own_prompts(
    operations: list[tuple[str, int, int]], pages: int, chunk: int
) -> None:
    engine = FakeEngine(
        max_ctx=280, max_slots=3, buckets=(1, 2, 3), pages=pages, prefill_chunk=chunk
    )
    clients = Clients(engine)
    for name, who, number in operations:
        clients.act(name, who, number)
        engine.slots.check()
    while engine.has_work:
        clients.act("run", 0, 0)
    for record in list(clients.live):
        engine.close(*record.seat)
    engine.slots.check()
    assert engine.stats()["kv_pages_used"] == engine.stats()["slots_used"] == 0


@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_updates_of_one_step_fit_the_ring(operations: list[tuple[str, int, int]]) -> None:
    engine = FakeEngine(max_ctx=280, max_slots=3, buckets=(1, 2, 3), prefill_chunk=100)
    clients = Clients(engine)
    for name, who, number in operations:
        clients.act(name, who, number)
    while engine.has_work:
        clients.act("run", 0, 0)
    layout = step_layout(EngineOptions(Path(), max_ctx=280, max_slots=3, prefill_chunk=100))
    assert engine.fake.most_updates <= layout.max_updates
    assert engine.fake.most_zero_pages <= layout.max_zero_pages
