"""Attention for clients over the fake engine, which tells what each row has read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import scenarios
from attend_calls import GREEDY, attend, fill, open_empty, seats
from attend_promises import random_rows, run_all
from engine_calls import admit_step
from fakes import FakeEngine, fake_attention, latent_id
from latentd.operations import AttendDone, Failed, StreamTokens
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    Change = Callable[[np.ndarray], np.ndarray]


def test_each_row_attends_what_its_layer_holds_up_to_its_position() -> None:
    engine, count = FakeEngine(), 150
    slot, held = open_empty(engine), [[], []]  # type: ignore[var-annotated]
    for pos in range(count):
        for layer in range(2):
            seed = 10 * pos + layer
            q, latent = random_rows(engine, 1, seed)
            held[layer].append(latent_id(latent[0]))
            done = attend(engine, layer, [(slot, pos)], seed)
            expected = fake_attention(q[0], held[layer], layer, engine.info)
            assert np.array_equal(done.o[0], expected)
            assert done.lengths == [pos + layer]  # it grows with the last layer


def test_rows_of_one_slot_and_of_others_run_in_one_request() -> None:
    engine = FakeEngine()
    one, two = open_empty(engine), open_empty(engine)
    fill(engine, two, 63)
    rows = [(one, 0), (one, 1), (one, 2), (two, 63), (two, 64)]
    for layer in range(2):
        q, latent = random_rows(engine, 5, 8)
        done = attend(engine, layer, rows, 8)
        ids = [latent_id(row) for row in latent]
        for row in range(3):
            assert np.array_equal(
                done.o[row], fake_attention(q[row], ids[: row + 1], layer, engine.info)
            )
    assert done.lengths == [3, 3, 3, 65, 65]


def test_a_position_may_be_written_again_until_its_last_layer() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    first = attend(engine, 0, [(slot, 0)], 1)
    other = attend(engine, 0, [(slot, 0)], 2)
    again = attend(engine, 0, [(slot, 0)], 1)
    assert not np.array_equal(first.o, other.o)
    assert np.array_equal(first.o, again.o)
    assert again.lengths == [0]


def test_the_request_that_completed_a_position_may_be_repeated_and_writes_nothing() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    fill(engine, slot, 62)
    rows = [(slot, 62), (slot, 63), (slot, 64)]
    attend(engine, 0, rows, 5)
    done = attend(engine, 1, rows, 6)
    before = engine.fake._memory.copy()
    again = attend(engine, 1, rows, 6)
    assert np.array_equal(done.o, again.o)
    assert done.lengths == again.lengths == [65] * 3
    assert np.array_equal(before, engine.fake._memory)


@pytest.mark.parametrize(("layer", "pos", "seed"), [(1, 1, 7), (0, 1, 6), (1, 0, 6), (1, 3, 6)])
def test_other_rows_at_a_complete_or_a_later_position_are_a_conflict(
    layer: int, pos: int, seed: int
) -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    fill(engine, slot, 1)
    attend(engine, 0, [(slot, 1)], 6)
    attend(engine, 1, [(slot, 1)], 6)
    with pytest.raises(RequestRejected) as refusal:
        attend(engine, layer, [(slot, pos)], seed)
    assert refusal.value.code == "position_conflict"
    assert refusal.value.detail == {"context_len": 2, "row": 0}


def test_a_position_that_was_taken_back_is_written_anew() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    fill(engine, slot, 66)
    engine.truncate(slot.slot_id, slot.epoch, 66, 65)
    fresh = open_empty(engine)
    fill(engine, fresh, 65)
    for layer in range(2):
        found = [attend(engine, layer, [(each, 65)], 4).o for each in (slot, fresh)]
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer": 2}, "layer is 2, must be 0 to 1"),
        ({"layer": -1}, "layer is -1"),
        ({"rows": []}, "rows are 0, must be 1 to 8"),
        ({"q": lambda q: q[:, :3]}, "q is bfloat16 [1, 3, 192], must be bfloat16 [1, 4, 192]"),
        ({"q": lambda q: q.astype(np.float32)}, "q is float32"),
        ({"latent": lambda x: x[:, :512]}, "latent is bfloat16 [1, 512]"),
        ({"latent": lambda x: x | 0x7FC0}, "holds NaN or infinity"),
        ({"latent": lambda x: x & 0x8000 | 0x7F80}, "holds NaN or infinity"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    q, latent = random_rows(engine, 1, 0)
    given: dict[str, Any] = {"layer": 0, "rows": seats((slot, 0)), "q": q, "latent": latent}
    for name, value in change.items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(RequestRejected, match="attend: field") as refusal:
        engine.admit_attend(**given)
    assert refusal.value.code == "invalid"
    assert text in str(refusal.value)


def test_nan_in_q_stays_in_its_row() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    q, latent = random_rows(engine, 1, 0)
    engine.admit_attend(0, seats((slot, 0)), (q | 0x7FC0).astype(np.uint16), latent)
    assert isinstance(run_all(engine)[-1], AttendDone)


def test_a_row_that_may_not_run_keeps_all_of_them_from_running() -> None:
    engine = FakeEngine(pages=3, max_ctx=192)
    one, two = open_empty(engine), open_empty(engine)
    fill(engine, one, 128)
    fill(engine, two, 64)
    cases = {
        "no_pages": [(one, 128), (two, 64)],
        "position_conflict": [(one, 128), (two, 65)],
    }
    for code, rows in cases.items():
        with pytest.raises(RequestRejected) as refusal:
            attend(engine, 0, rows, 0)
        assert refusal.value.code == code
        assert [len(engine.slots.slots[slot.slot_id].pages) for slot in (one, two)] == [2, 1]
        assert not engine.has_work
        engine.slots.check()
    engine.close(two.slot_id, two.epoch)
    with pytest.raises(RequestRejected, match="row 1") as refusal:
        attend(engine, 0, [(one, 128), (two, 64)], 0)
    assert refusal.value.code == "epoch_gone"
    fill(engine, one, 192)
    with pytest.raises(RequestRejected) as refusal:
        attend(engine, 0, [(one, 192)], 0)
    assert refusal.value.code == "context_full"


def test_rows_of_one_slot_must_stand_together_and_count_up() -> None:
    engine = FakeEngine()
    one, two = open_empty(engine), open_empty(engine)
    for rows in ([(one, 0), (two, 0), (one, 1)], [(one, 0), (one, 2)], [(one, 0), (one, 0)]):
        with pytest.raises(RequestRejected) as refusal:
            attend(engine, 0, rows, 0)
        assert refusal.value.code == "invalid"


def test_a_slot_does_one_thing_at_a_time() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    engine.admit_attend(0, seats((slot, 0)), *random_rows(engine, 1, 0))
    for ask in (
        lambda: engine.admit_attend(0, seats((slot, 0)), *random_rows(engine, 1, 0)),
        lambda: admit_step(engine, slot.slot_id, slot.epoch, 0, 5),
        lambda: engine.truncate(slot.slot_id, slot.epoch, 0, 0),
    ):
        with pytest.raises(RequestRejected) as refusal:
            ask()
        assert refusal.value.code == "busy"
    run_all(engine)
    admit_step(engine, slot.slot_id, slot.epoch, 0, 5)


@pytest.mark.parametrize("is_launched", [False, True])
def test_closing_one_of_its_slots_frees_the_others(is_launched: bool) -> None:
    engine = FakeEngine()
    one, two = open_empty(engine), open_empty(engine)
    attend(engine, 0, [(one, 0), (two, 0)], 0)
    engine.admit_attend(1, seats((one, 0), (two, 0)), *random_rows(engine, 2, 0))
    if is_launched:
        engine.launch()
    engine.close(one.slot_id, one.epoch)
    (event,) = run_all(engine)
    if is_launched:
        assert isinstance(event, AttendDone)
    else:
        assert isinstance(event, Failed)
        assert event.code == "epoch_gone"
    assert engine.slots.slots[two.slot_id].length == int(is_launched)
    engine.slots.check()
    attend(engine, 0, [(two, int(is_launched))], 1)


def test_requests_of_one_layer_share_a_launch_and_those_of_others_do_not() -> None:
    engine = FakeEngine()
    slots = [open_empty(engine) for _ in range(4)]
    attend(engine, 0, [(slot, 0) for slot in slots], 0)
    launches = engine.fake.launches
    for layer, slot in zip((0, 1, 0, 1), slots, strict=True):
        engine.admit_attend(layer, seats((slot, 0)), *random_rows(engine, 1, layer))
    assert len(run_all(engine)) == 4
    assert engine.fake.launches == launches + 2


def test_attention_beside_streams_and_prompts_changes_none_of_their_tokens() -> None:
    quiet, busy = FakeEngine(), FakeEngine()
    prompt = scenarios.draw_tokens(300, 1)
    found = []
    for engine in (quiet, busy):
        slot = scenarios.open_slot(engine, prompt)
        other = open_empty(engine)
        scenarios.start_stream(engine, (slot.request.slot_id, slot.request.epoch), 300, 40)
        tokens: list[int] = []
        pos = layer = 0
        while engine.has_work:
            if engine is busy and engine.slots.slots[other.slot_id].task is None:
                engine.admit_attend(layer, seats((other, pos)), *random_rows(engine, 1, pos))
                pos, layer = pos + layer, 1 - layer
            for event in engine.run():
                if isinstance(event, StreamTokens):
                    tokens += event.tokens
            if len(tokens) == 40:
                break
        run_all(engine)
        found.append(tokens)
    assert found[0] == found[1]
    assert pos > 5


def test_prompts_never_begin_on_attended_pages() -> None:
    engine = FakeEngine(cache=True)
    slot = open_empty(engine)
    fill(engine, slot, 128)
    for prompt in ([0] * 200, [-1 % 256] * 200):
        found = engine.admit_open(prompt, GREEDY, False)
        run_all(engine)
        assert found.cached_tokens == 0
        engine.close(found.slot_id, found.epoch)


def test_a_fork_may_be_written_while_its_source_is_left_alone() -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    fill(engine, slot, 70)
    state = engine.fork(slot.slot_id, slot.epoch, 70, None)
    fork = scenarios.Seat(state.slot_id, state.epoch)
    for layer in range(2):
        attend(engine, layer, [(fork, 70)], 99)  # type: ignore[list-item]
    twin = open_empty(engine)
    fill(engine, twin, 70)
    for layer in range(2):
        found = [attend(engine, layer, [(each, 70)], 3).o for each in (slot, twin)]
    assert np.array_equal(found[0], found[1])


def test_a_daemon_of_attention_alone_refuses_all_that_needs_the_model() -> None:
    engine = FakeEngine(attend_only=True)
    slot = open_empty(engine)
    seat = slot.slot_id, slot.epoch
    for ask in (
        lambda: engine.admit_open([1], GREEDY, False),
        lambda: admit_step(engine, *seat, 0, 5),
        lambda: scenarios.start_stream(engine, seat, 0, 5),
    ):
        with pytest.raises(RequestRejected, match="attend only") as refusal:
            ask()
        assert refusal.value.code == "unsupported"
    attend(engine, 0, [(slot, 0)], 0)
    assert engine.slots.num_used == 1
