"""What an engine promises of verified drafts on either backend, as functions that assert it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import scenarios
from engine_calls import admit_step
from latentd.extras import Extras, Top
from latentd.operations import SamplingParams, StreamTokens, VerifyDone, VerifyRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine

HOT = SamplingParams(1.1, top_k=60, top_p=0.97, seed=(1 << 64) - 5)


def plain(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, steps: int
) -> tuple[list[int], list[float], list[Top]]:
    """The first token after a prompt and those of a stream, with what it tells beside them."""
    slot = scenarios.open_slot(engine, prompt, sampling)
    assert slot.token is not None
    tokens, logprobs, tops = [slot.token], list[float](), list[Top]()
    seat = slot.request.slot_id, slot.request.epoch
    asked = Extras(top=2)
    scenarios.start_stream(engine, seat, slot.length, steps, asked)
    for event in scenarios.run_all(engine):
        assert isinstance(event, StreamTokens)
        tokens, logprobs = tokens + event.tokens, logprobs + event.logprobs
        tops += event.tops
    scenarios.close(engine, slot)
    return tokens, logprobs, tops


def drafts_change_no_token(
    engine: Engine, sampling: SamplingParams, steps: int, prompt_len: int = 50
) -> None:
    """Right ones, wrong ones and half-right ones, across pages, beside a stream and a step; the
    logits afterwards are those of a slot that never saw a draft."""
    prompt, rng = scenarios.draw_tokens(prompt_len, 3), np.random.default_rng(4)
    tokens, logprobs, tops = plain(engine, prompt, sampling, steps + 20)
    other = scenarios.open_slot(engine, scenarios.draw_tokens(30, 8))
    slot = scenarios.open_slot(engine, prompt, sampling)
    assert slot.token is not None
    found, told, likely, drafted = [slot.token], list[float](), list[Top](), 0
    while len(found) <= steps:
        right = int(rng.integers(0, 6))
        draft = tokens[len(found) : len(found) + right]
        draft += [(tokens[len(found) + right] + 1) % 256] * int(rng.integers(0, 2))
        admit_step(engine, other.request.slot_id, other.request.epoch, other.length, 5)
        other.length += 1
        seat = slot.request.slot_id, slot.request.epoch
        task = VerifyRequest(*seat, slot.length, tuple(draft), frozenset(), Extras(top=2))
        engine.admit_verify(task, None, None)
        (done,) = [e for e in scenarios.run_all(engine) if isinstance(e, VerifyDone)]
        assert done.request is task
        assert len(done.tokens) == right + 1
        slot.length, slot.token = done.context_len, done.tokens[-1]
        assert len(engine.slots.slots[seat[0]].pages) == -(-slot.length // 64)
        found, told = found + done.tokens, told + done.logprobs
        likely, drafted = likely + done.tops, drafted + len(draft)
        engine.slots.check()
    count = len(found) - 1
    assert found == tokens[: len(found)]
    assert told == logprobs[:count]
    assert likely == tops[:count]
    assert engine.stats()["drafted"] == drafted
    assert slot.length == len(prompt) + count
    never = scenarios.open_slot(engine, [*prompt, *found[:-1]], sampling)
    assert scenarios.step(engine, [(slot, 7)]) == scenarios.step(engine, [(never, 7)])
    for seat_of in (slot, other, never):
        scenarios.close(engine, seat_of)
    engine.slots.check()
    assert engine.slots.pool.num_used == 0


def rows_of_many_slots_share_a_step(engine: Engine, slots: int) -> None:
    """More rows than the largest bucket holds, beside streams: all of them run, with the tokens of
    their own."""
    expected, running = [], []
    for n in range(slots):
        expected.append(plain(engine, scenarios.draw_tokens(20, n), HOT, 30)[0])
    for n in range(slots):
        running.append(scenarios.open_slot(engine, scenarios.draw_tokens(20, n), HOT))
    found: list[list[int]] = [[slot.token or 0] for slot in running]
    requests: dict[object, int] = {}
    for n, slot in enumerate(running[1:], 1):
        seat = slot.request.slot_id, slot.request.epoch
        draft = tuple(expected[n][1:4])
        request = VerifyRequest(*seat, 20, draft, frozenset())
        requests[engine.admit_verify(request, None, None)] = n
    seat = running[0].request.slot_id, running[0].request.epoch
    requests[scenarios.start_stream(engine, seat, 20, 10)] = 0
    for event in scenarios.run_all(engine):
        assert isinstance(event, StreamTokens | VerifyDone)
        found[requests[event.request]] += event.tokens
    assert [len(tokens) for tokens in found] == [11] + [5] * (slots - 1)
    assert found == [tokens[: len(found[n])] for n, tokens in enumerate(expected)]
    for slot in running:
        scenarios.close(engine, slot)
