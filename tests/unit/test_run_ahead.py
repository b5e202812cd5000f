"""Streams that run ahead, on the cpu backend and over the fake one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ahead_promises
import scenarios
from engine_calls import admit_step
from fakes import FakeEngine
from latentd.operations import OpenDone, StepRequest, StreamRequest, StreamTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd.engine import Engine
    from latentd.operations import Event
    from latentd.plans import StepPlan

    Start = Callable[..., Engine]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_has_the_bits_of_steps_alone_and_beside_others(
    start: Start, temperature: float
) -> None:
    engine = start(max_ctx=120, max_slots=12)
    ahead_promises.a_stream_has_the_bits_of_steps(engine, 50, 20, temperature, others=11)


def test_a_stream_has_the_bits_of_steps_beside_63_others(start: Start) -> None:
    engine = start(max_ctx=80, max_slots=64)
    ahead_promises.a_stream_has_the_bits_of_steps(engine, 40, 12, 0.8, others=63)


def test_a_stream_at_2k_has_the_bits_of_steps_beside_63_others(start: Start) -> None:
    engine = start(max_ctx=2100, max_slots=64, kv_pages=400)
    ahead_promises.a_stream_taken_back_has_the_bits_of_steps(engine, 2040, 20, others=63)


def test_a_step_in_vain_leaves_no_trace(start: Start) -> None:
    ahead_promises.a_step_in_vain_leaves_no_trace(start())


def test_chunks_beside_streams_have_the_bits_of_a_prompt_alone(start: Start) -> None:
    engine = start(max_ctx=700, prefill_chunk=512)
    ahead_promises.chunks_beside_streams_change_no_bit(engine, 130, (1, 7, 64, 100))
    ahead_promises.chunks_beside_streams_change_no_bit(engine, 520, (512,))


def stream_of(engine: FakeEngine, prompt: list[int], **changes: Any) -> StreamRequest:
    """A stream on a new slot, with room for all its tokens unless changed."""
    seat = scenarios.open_slot(engine, prompt).request
    usual = {"max_steps": 100, "stop": scenarios.NO_STOP, "credit": 100}
    request = StreamRequest(seat.slot_id, seat.epoch, len(prompt), **{**usual, **changes})
    engine.fake.launches = 0
    return engine.admit_stream(request, None, None)


def tokens_of(events: Sequence[object], request: StreamRequest) -> tuple[list[int], str | None]:
    """All tokens of a stream, and why it ended."""
    found = [e for e in events if isinstance(e, StreamTokens) and e.request is request]
    return [token for event in found for token in event.tokens], found[-1].end


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    engine = FakeEngine()
    stream_of(engine, [1, 2])
    engine.launch()
    assert [plan.token_ids for plan in engine.launches.in_flight] == [
        (engine.expected_token([1, 2]),),
        (-1,),  # what the device samples in the first
    ]
    for _ in range(5):
        engine.finish()
        engine.launch()
        assert len(engine.launches.in_flight) == 2


@pytest.mark.parametrize(
    ("changes", "end", "steps"),
    [
        ({"max_steps": 7}, "max_steps", 7),
        ({"credit": 5}, None, 5),
        ({"max_steps": 500, "credit": 500}, "context_full", 98),
    ],
    ids=["max_steps", "credit", "context_full"],
)
def test_a_limit_known_before_makes_no_step_in_vain(
    changes: dict[str, int], end: str | None, steps: int
) -> None:
    engine = FakeEngine(max_ctx=100)
    request = stream_of(engine, [1, 2], **changes)
    tokens, why = tokens_of(scenarios.run_all(engine), request)
    assert (len(tokens), why, engine.fake.launches) == (steps, end, steps)


def test_a_stop_token_makes_one_step_in_vain_and_nothing_waits_for_it() -> None:
    engine = FakeEngine()
    tokens = [1, 2, engine.expected_token([1, 2])]
    while len(tokens) < 10:
        tokens.append(engine.expected_token(tokens))
    request = stream_of(engine, [1, 2], stop=frozenset(tokens[-1:]))
    events: list[Event] = []
    while not (events and isinstance(events[-1], StreamTokens) and events[-1].end):
        events += engine.run()
    assert tokens_of(events, request) == (tokens[3:], "stop")
    assert len(engine.launches.in_flight) == 1
    admit_step(engine, request.slot_id, request.epoch, 9, 77)  # at once
    (done,) = scenarios.run_all(engine)
    assert isinstance(done, StepRequest)
    assert done.token == engine.expected_token([*tokens[:9], 77])
    assert engine.fake.launches == 7 + 2  # seven tokens, one in vain, the step


def test_a_cancelled_stream_keeps_what_was_launched() -> None:
    engine = FakeEngine()
    request = stream_of(engine, [1, 2])
    for _ in range(3):
        engine.run()
    engine.launch()
    engine.cancel(request)
    tokens, why = tokens_of(scenarios.run_all(engine), request)
    assert (len(tokens), why, engine.fake.launches) == (2, "cancelled", 5)
    assert engine.slot(request.slot_id, request.epoch).context_len == 7


def test_a_page_of_a_closed_slot_is_free_when_its_last_launch_has_completed() -> None:
    engine = FakeEngine(pages=3)
    request = stream_of(engine, [1] * 100)
    engine.launch()
    engine.close(request.slot_id, request.epoch)
    pool = engine.slots.pool
    assert (pool.num_used, pool.num_waiting, pool.num_free) == (0, 2, 1)
    opened = engine.admit_open([2] * 190, scenarios.GREEDY, False)  # promised the waiting ones
    events = scenarios.run_all(engine)
    assert isinstance(events[-1], OpenDone)
    assert events[-1].token == engine.expected_token([2] * 190)
    assert (opened.prompt_len, pool.num_waiting) == (190, 0)


def test_a_step_that_needs_a_waiting_page_gets_it_after_the_launches_in_flight() -> None:
    engine = FakeEngine(pages=2)
    slot = scenarios.open_slot(engine, [2] * 64)
    request = stream_of(engine, [1] * 10)
    engine.launch()
    engine.close(request.slot_id, request.epoch)
    admit_step(engine, slot.request.slot_id, slot.request.epoch, 64, 5)
    done = scenarios.run_all(engine)[-1]
    assert isinstance(done, StepRequest)
    assert done.token == engine.expected_token([2] * 64 + [5])


def test_between_two_replays_run_few_prompt_rows_and_many_while_nobody_decodes() -> None:
    engine = FakeEngine(prefill_chunk=100, prefill_rows=30)
    request = stream_of(engine, [1, 2], max_steps=1000, credit=40)
    engine.admit_open([3] * 4000, scenarios.GREEDY, False)
    plans: list[StepPlan] = []
    launch = engine.fake.launch

    def note(plan: StepPlan, bucket: int) -> None:
        plans.append(plan)
        launch(plan, bucket)

    engine.fake.launch = note  # type: ignore[method-assign]
    scenarios.run_all(engine)
    kinds = [plan.is_chunk for plan in plans]
    beside = 2 * 40
    assert kinds[:beside] == [False, True] * 40  # a replay first, and never two chunks
    assert {plan.rows for plan in plans[:beside] if plan.is_chunk} == {30}
    assert all(kinds[beside:])  # the stream waits for credit: chunks follow each other
    assert max(plan.rows for plan in plans[beside:]) == 100
    assert request.credit == 0


def test_chunks_are_launched_ahead_too() -> None:
    engine = FakeEngine(prefill_chunk=100)
    engine.admit_open([3] * 400, scenarios.GREEDY, False)
    engine.launch()
    assert [plan.context_len[0] for plan in engine.launches.in_flight] == [1, 101]
    assert isinstance(scenarios.run_all(engine)[-1], OpenDone)
