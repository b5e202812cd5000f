"""What the engine admits, refuses and reports, over the fake backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine_calls import GREEDY, admit_step, open_slot, refused, run_all, step
from fakes import FakeEngine
from latentd.operations import (
    DeviceFault,
    Failed,
    OpenDone,
    SamplingParams,
    StepRequest,
    StreamRequest,
    StreamTokens,
)

if TYPE_CHECKING:
    from latentd.engine import Engine
    from latentd.operations import Event

NO_STOP: frozenset[int] = frozenset()


def start_stream(engine: Engine, request: StreamRequest, token: int | None = None) -> StreamRequest:
    return engine.admit_stream(request, token, None)


def test_tokens_depend_on_all_tokens_before() -> None:
    engine = FakeEngine(prefill_chunk=50)
    prompt = [n % 256 for n in range(1, 171)]
    request = engine.admit_open(prompt, GREEDY, True)
    (done,) = run_all(engine)
    assert isinstance(done, OpenDone)
    assert done.context_len == 170
    assert done.token == engine.expected_token(prompt)
    assert done.logits is not None
    assert int(done.logits.argmax()) == done.token
    tokens = [*prompt, done.token]
    for forced in (None, 5, None, None):
        if forced is not None:
            tokens[-1] = forced
        reply = step(engine, request, len(tokens) - 1, forced)
        assert reply.context_len == len(tokens)
        assert reply.token == engine.expected_token(tokens)
        tokens.append(reply.token)


def test_an_empty_prompt_completes_at_once_and_needs_a_named_token() -> None:
    engine = FakeEngine()
    request = engine.admit_open([], GREEDY, False)
    assert engine.has_work
    assert engine.run() == [OpenDone(request, 0, None, None, None)]
    refused("invalid", lambda: admit_step(engine, request.slot_id, request.epoch, 0))
    assert step(engine, request, 0, 9).token == engine.expected_token([9])


def test_a_prompt_must_leave_room_for_one_step() -> None:
    engine = FakeEngine(max_ctx=100)
    for length in (100, 101):
        error = refused("context_full", lambda n=length: engine.admit_open([1] * n, GREEDY, False))  # type: ignore[misc]
        assert "at most 99" in str(error)
    request = open_slot(engine, [1] * 99)
    assert step(engine, request, 99).context_len == 100
    errors = {
        str(refused("context_full", lambda: admit_step(
                engine,
            request.slot_id, request.epoch, 100, None, None, False)))
        for _ in range(10)
    }  # fmt: skip
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([256], GREEDY),
        ([-1], GREEDY),
        ([[1]], GREEDY),
        ([1.5], GREEDY),
        ([1 << 70], GREEDY),
        ([1], SamplingParams(temperature=-1)),
        ([1], SamplingParams(temperature=float("nan"))),
        ([1], SamplingParams(top_p=0)),
        ([1], SamplingParams(top_k=-1)),
        ([1], SamplingParams(min_p=2)),
        ([1], SamplingParams(seed=1 << 64)),
    ],
)
def test_an_invalid_open_changes_nothing(prompt: list[int], sampling: SamplingParams) -> None:
    engine = FakeEngine()
    refused("invalid", lambda: engine.admit_open(prompt, sampling, False))
    assert engine.stats()["slots_used"] == 0
    assert not engine.has_work


def test_slots_and_pages_run_out_by_name() -> None:
    engine = FakeEngine(max_slots=2, buckets=(1, 2), pages=3)
    open_slot(engine, [1] * 65)
    refused("no_pages", lambda: engine.admit_open([1] * 65, GREEDY, False))
    open_slot(engine, [1])
    refused("no_slot", lambda: engine.admit_open([], GREEDY, False))
    assert engine.stats()["kv_pages_used"] == 3


def test_a_slot_runs_one_operation_at_a_time() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1, 2])
    admit_step(engine, slot.slot_id, slot.epoch, 2)
    refused("busy", lambda: admit_step(engine, slot.slot_id, slot.epoch, 2))
    refused("busy", lambda: engine.truncate(slot.slot_id, slot.epoch, 2, 1))
    assert engine.slot(slot.slot_id, slot.epoch).busy
    run_all(engine)
    error = refused(
        "position_conflict",
        lambda: admit_step(engine, slot.slot_id, slot.epoch, 2),
    )
    assert error.detail == {"context_len": 3}


def test_truncate_gives_pages_back_and_the_kept_page_is_appended_to() -> None:
    engine = FakeEngine()
    prompt = [n % 256 for n in range(200)]
    slot = open_slot(engine, prompt)
    assert engine.slots.pool.num_used == 4
    assert engine.truncate(slot.slot_id, slot.epoch, 200, 70) == 70
    assert engine.slots.pool.num_used == 2
    assert engine.slot(slot.slot_id, slot.epoch).token is None
    refused("invalid", lambda: admit_step(engine, slot.slot_id, slot.epoch, 70))
    assert step(engine, slot, 70, 7).token == engine.expected_token([*prompt[:70], 7])
    refused("invalid", lambda: engine.truncate(slot.slot_id, slot.epoch, 71, 72))


def test_close_releases_everything_and_ends_what_waits() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1] * 64)
    request = admit_step(engine, slot.slot_id, slot.epoch, 64)
    engine.close(slot.slot_id, slot.epoch)
    (failed,) = run_all(engine)
    assert isinstance(failed, Failed)
    assert (failed.request, failed.code) == (request, "epoch_gone")
    assert engine.stats()["kv_pages_used"] == engine.stats()["slots_used"] == 0
    refused("epoch_gone", lambda: engine.close(slot.slot_id, slot.epoch))


def test_a_stream_feeds_itself_until_max_steps() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1, 2, 3])
    tokens = [1, 2, 3, engine.expected_token([1, 2, 3])]
    start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 3, 200, NO_STOP, 1000))
    events = run_all(engine)
    for pos, event in enumerate(events, start=4):
        assert isinstance(event, StreamTokens)
        assert event.pos == event.context_len == pos
        assert event.tokens == [engine.expected_token(tokens)]
        tokens += event.tokens
    assert [event.end for event in events if isinstance(event, StreamTokens)][-2:] == [
        None,
        "max_steps",
    ]
    assert len(events) == 200
    assert not engine.slot(slot.slot_id, slot.epoch).busy


def test_a_stop_token_is_returned_and_not_appended() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1, 2, 3])
    tokens = [1, 2, 3, engine.expected_token([1, 2, 3])]
    for _ in range(2):
        tokens.append(engine.expected_token(tokens))
    start_stream(
        engine, StreamRequest(slot.slot_id, slot.epoch, 3, 200, frozenset({tokens[-1]}), 1000)
    )
    last = run_all(engine)[-1]
    assert isinstance(last, StreamTokens)
    assert (last.end, last.tokens, last.context_len) == ("stop", tokens[-1:], 5)
    assert engine.slot(slot.slot_id, slot.epoch).token == tokens[-1]


def test_a_stream_waits_for_credit() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1])
    stream = start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 1, 10, NO_STOP, 2))
    assert len(run_all(engine)) == 2
    engine.add_credit(stream, 3)
    assert len(run_all(engine)) == 3
    engine.cancel(stream)
    assert run_all(engine) == [StreamTokens(stream, 6, [], [], 6, "cancelled")]
    engine.cancel(stream)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("max_ctx", "pages", "end", "length"),
    [(70, 2, "context_full", 70), (128, 1, "no_pages", 64)],
    ids=["context_full", "no_pages"],
)
def test_a_stream_ends_cleanly_at_a_limit(max_ctx: int, pages: int, end: str, length: int) -> None:
    engine = FakeEngine(pages=pages, max_ctx=max_ctx)
    slot = open_slot(engine, [1] * 60)
    start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 60, 500, NO_STOP, 500))
    last = run_all(engine)[-1]
    assert isinstance(last, StreamTokens)
    assert (last.end, last.context_len) == (end, length)
    assert engine.slot(slot.slot_id, slot.epoch).token is not None
    engine.close(slot.slot_id, slot.epoch)
    assert engine.stats()["kv_pages_used"] == 0


def test_a_prompt_that_meets_no_pages_in_the_middle_frees_what_it_took() -> None:
    engine = FakeEngine(pages=4, prefill_chunk=64)
    other = open_slot(engine, [1] * 62)
    start_stream(engine, StreamRequest(other.slot_id, other.epoch, 62, 9, NO_STOP, 9))
    request = engine.admit_open([2] * 192, GREEDY, False)  # and the stream takes the last page
    (failed,) = [event for event in run_all(engine) if isinstance(event, Failed)]
    assert (failed.request, failed.code) == (request, "no_pages")
    assert failed.detail == {"pages_needed": 1, "pages_free": 0, "pages_total": 4}
    assert engine.stats()["kv_pages_used"] == 2
    refused("epoch_gone", lambda: engine.slot(request.slot_id, request.epoch))


def test_a_cancelled_prompt_frees_its_slot() -> None:
    engine = FakeEngine(prefill_chunk=16)
    request = engine.admit_open([1] * 100, GREEDY, False)
    engine.run()
    engine.cancel(request)
    (failed,) = run_all(engine)
    assert isinstance(failed, Failed)
    assert failed.code == "cancelled"
    assert engine.stats()["slots_used"] == engine.stats()["kv_pages_used"] == 0


def test_prompts_and_streams_do_not_starve_each_other() -> None:
    engine = FakeEngine(prefill_chunk=16)
    slot = open_slot(engine, [1])
    stream = start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 1, 1000, NO_STOP, 1000))
    engine.admit_open([1] * 160, GREEDY, False)
    events: list[Event] = []
    runs = 0
    while not any(isinstance(event, OpenDone) for event in events):
        events = engine.run()
        runs += 1
    assert runs <= 25
    assert 8 <= 1000 - stream.credit <= 25


def test_rows_of_many_slots_share_one_launch() -> None:
    engine = FakeEngine()
    slots = [open_slot(engine, [n, n]) for n in range(5)]
    launches = engine.fake.launches
    for slot in slots:
        admit_step(engine, slot.slot_id, slot.epoch, 2, 3)
    events = engine.run()
    assert engine.fake.launches == launches + 1
    assert [event.token for event in events if isinstance(event, StepRequest)] == [
        engine.expected_token([n, n, 3]) for n in range(5)
    ]
    assert engine.stats()["steps_by_bucket"] == {"8": 1}


def test_a_drawn_seed_is_told_and_kept() -> None:
    engine = FakeEngine()
    request = engine.admit_open([1, 2], SamplingParams(temperature=1.0), False)
    (done,) = run_all(engine)
    assert isinstance(done, OpenDone)
    assert request.sampling.seed is not None
    tokens = [1, 2, engine.expected_token([1, 2], request.sampling)]
    assert done.token == tokens[-1]
    hot = SamplingParams(temperature=2.0)
    admit_step(engine, request.slot_id, request.epoch, 2, None, hot, False)
    (reply,) = run_all(engine)
    assert isinstance(reply, StepRequest)
    assert reply.token == engine.expected_token(tokens, request.sampling)


def test_page_order_changes_no_token() -> None:
    outcomes = []
    for order in (None, list(range(20))[::-1], list(np.random.default_rng(5).permutation(20))):
        engine = FakeEngine(pages=20)
        if order is not None:
            engine.slots.pool.reorder([int(page) for page in order])
        slot = open_slot(engine, [1])
        start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 1, 200, NO_STOP, 200))
        outcomes.append([e.tokens for e in run_all(engine) if isinstance(e, StreamTokens)])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_closing_a_slot_waits_for_nothing_and_what_runs_of_it_is_dropped() -> None:
    engine = FakeEngine(prefill_chunk=16)
    slot = open_slot(engine, [2])
    engine.admit_open([3] * 200, GREEDY, False)
    stream = start_stream(engine, StreamRequest(slot.slot_id, slot.epoch, 1, 1000, NO_STOP, 1000))
    engine.run()
    engine.launch()
    assert len(engine.launches.in_flight) == 2  # the stream's next step and a chunk
    engine.close(slot.slot_id, slot.epoch)
    assert len(engine.launches.in_flight) == 2
    events = [event for event in run_all(engine) if event.request is stream]
    assert events[-1] == StreamTokens(stream, 2, [], [], 2, "closed")


def test_a_device_fault_is_raised() -> None:
    engine = FakeEngine()
    engine.admit_open([1], GREEDY, False)
    engine.fake.fault = "an illegal address"
    with pytest.raises(DeviceFault, match="illegal"):
        engine.run()
