"""Layers of a position come in order, so that no slot ever holds zeros that nobody wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attend_calls import attend, fill, open_empty
from attend_promises import run_all
from engine_calls import admit_step
from fakes import FakeEngine
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.operations import OpenRequest


@pytest.mark.parametrize(
    ("asked", "missing", "pos"),
    [
        ([(1, 1)], 0, 5),
        ([(0, 1), (2, 1)], 1, 5),
        ([(0, 1), (1, 1), (2, 2)], 0, 6),
        ([(0, 3), (1, 2), (2, 3)], 1, 7),
        ([(0, 3), (0, 1), (1, 3), (2, 4)], 0, 8),
    ],
    ids=str,
)
def test_a_layer_in_front_of_which_one_was_skipped_is_a_conflict_that_names_it(
    asked: list[tuple[int, int]], missing: int, pos: int
) -> None:
    engine = FakeEngine(layers=3)
    slot = open_empty(engine)
    fill(engine, slot, 5)
    *before, (layer, count) = asked
    for each, rows in before:
        attend(engine, each, [(slot, 5 + row) for row in range(rows)], each)
    with pytest.raises(
        RequestRejected, match=f"row 0 of {count}: layer {layer} .* position {pos} "
    ) as refusal:
        attend(engine, layer, [(slot, 5 + row) for row in range(count)], 9)
    assert refusal.value.code == "position_conflict"
    assert refusal.value.detail == {"context_len": 5, "layer": missing, "row": 0}
    fill(engine, slot, 14)  # from layer 0 on, nothing is in the way


def test_a_refused_request_forgets_no_layer_that_was_written() -> None:
    engine = FakeEngine(pages=1, max_ctx=192)
    slot = open_empty(engine)
    fill(engine, slot, 63)
    attend(engine, 0, [(slot, 63)], 1)
    with pytest.raises(RequestRejected) as refusal:
        attend(engine, 0, [(slot, 63), (slot, 64)], 1)
    assert refusal.value.code == "no_pages"
    assert attend(engine, 1, [(slot, 63)], 1).lengths == [64]


def take_back(engine: FakeEngine, slot: OpenRequest) -> None:
    engine.truncate(slot.slot_id, slot.epoch, 64, 64)


def step(engine: FakeEngine, slot: OpenRequest) -> None:
    admit_step(engine, slot.slot_id, slot.epoch, 64, 5)
    run_all(engine)


@pytest.mark.parametrize("between", [take_back, step])
def test_what_happens_to_a_slot_between_two_layers_ends_the_position_in_progress(
    between: Callable[[FakeEngine, OpenRequest], None],
) -> None:
    engine = FakeEngine()
    slot = open_empty(engine)
    fill(engine, slot, 64)
    attend(engine, 0, [(slot, 64), (slot, 65)], 1)
    between(engine, slot)
    length = engine.slots.slots[slot.slot_id].length
    with pytest.raises(RequestRejected, match=r"layer 1 .* came before layer 0"):
        attend(engine, 1, [(slot, length)], 2)
    fill(engine, slot, length + 1)
