"""What an engine promises of rows that cannot run: their batch mates notice nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

import scenarios
from engine_calls import admit_step
from latentd.operations import StepRequest, StreamRequest, StreamTokens
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.engine import Engine
    from scenarios import Tracked

MAX_CTX = 130
PAGES = 3 + 1 + 1 + 1 + 6
"""Those of the full slot, the starved one, the one with the bad token, the cancelled one, and the
mates."""
MATES = (1, 60, 65, 100)
"""Lengths of those who run; none of them needs a page in the next steps."""
TOKENS = (17, 18)
"""Appended to each slot."""


@dataclass
class Batch:
    """Four mates, and four slots whose rows do not run. `streamed` came of the cancelled one."""

    mates: list[Tracked]
    full: Tracked
    starved: Tracked
    bad: Tracked
    cancelled: Tracked
    streamed: list[int] = field(default_factory=list)


def rows_that_cannot_run_change_no_bit_of_their_mates(engine: Engine) -> None:
    """A row at max_ctx, one without pages, one with a bad token id and one that is cancelled while
    it runs, in each of two batches; who was refused or cancelled goes on with the bits of a run
    alone. `engine` has MAX_CTX, eight slots and PAGES pages."""
    mates = [scenarios.open_slot(engine, scenarios.draw_tokens(n, n)) for n in MATES]
    starved, bad, cancelled = (
        scenarios.open_slot(engine, scenarios.draw_tokens(n, n)) for n in (64, 10, 20)
    )
    alone = [_alone(engine, slot) for slot in mates]
    refused_alone = [_alone(engine, slot) for slot in (starved, bad)]
    stream_alone = _stream_alone(engine, cancelled)
    full = scenarios.open_slot(engine, scenarios.draw_tokens(MAX_CTX - 1, 9))
    scenarios.step(engine, [(full, 1)])
    assert engine.slots.pool.num_free == 0
    batch = Batch(mates, full, starved, bad, cancelled)
    together = [_run(engine, batch, token) for token in TOKENS]
    assert [list(found) for found in zip(*together, strict=True)] == alone
    assert batch.streamed == stream_alone[: len(batch.streamed)]
    assert cancelled.length == 20 + len(batch.streamed)
    scenarios.close(engine, full)
    for slot, expected in zip((starved, bad), refused_alone, strict=True):
        assert [scenarios.step(engine, [(slot, token)])[0] for token in TOKENS] == expected
    engine.slots.check()


def _alone(engine: Engine, slot: Tracked) -> list[bytes]:
    """Logits of TOKENS, which are taken back."""
    length = slot.length
    found = [scenarios.step(engine, [(slot, token)], 1)[0] for token in TOKENS]
    scenarios.take_back(engine, slot, length)
    return found


def _stream_alone(engine: Engine, slot: Tracked) -> list[int]:
    """Tokens of a stream, which are taken back."""
    length, token = slot.length, slot.token
    found = scenarios.stream(engine, slot, 2 * len(TOKENS))
    scenarios.take_back(engine, slot, length)
    slot.token = token
    return found


def _run(engine: Engine, batch: Batch, token: int) -> list[bytes]:
    """One batch: the logits of the mates."""
    cancelled, vocab = batch.cancelled, engine.info.vocab_size
    stream = StreamRequest(*_seat(cancelled), cancelled.length, 50, scenarios.NO_STOP, 50)
    engine.admit_stream(stream, cancelled.token, None)
    steps = [_admit(engine, slot, token) for slot in batch.mates[:2]]
    refused = [(batch.full, token), (batch.starved, token), (batch.bad, vocab), (batch.bad, -1)]
    codes = []
    for slot, wrong in refused:
        with pytest.raises(RequestRejected) as refusal:
            _admit(engine, slot, wrong)
        codes.append(refusal.value.code)
    assert codes == ["context_full", "no_pages", "invalid", "invalid"]
    steps += [_admit(engine, slot, token) for slot in batch.mates[2:]]
    before = _launches(engine)
    engine.launch()
    assert _launches(engine) == before + 1
    engine.cancel(stream)
    return _finish(engine, batch, steps)


def _launches(engine: Engine) -> int:
    return len(engine.launches.in_flight)


def _finish(engine: Engine, batch: Batch, steps: list[StepRequest]) -> list[bytes]:
    """Take over what the batch has brought."""
    found, cancelled, ends = {}, batch.cancelled, []
    for event in scenarios.run_all(engine):
        if isinstance(event, StreamTokens):
            batch.streamed += event.tokens
            cancelled.length = event.context_len
            cancelled.token = event.tokens[-1] if event.tokens else cancelled.token
            ends.append(event.end)
        else:
            assert isinstance(event, StepRequest)
            assert event.logits is not None
            found[id(event.request)] = event.logits.tobytes()
    assert ends[-1] == "cancelled"
    for slot in batch.mates:
        slot.length += 1
    return [found[id(step)] for step in steps]


def _admit(engine: Engine, slot: Tracked, token: int) -> StepRequest:
    return admit_step(engine, *_seat(slot), slot.length, token, None, True)


def _seat(slot: Tracked) -> tuple[int, int]:
    return slot.request.slot_id, slot.request.epoch
