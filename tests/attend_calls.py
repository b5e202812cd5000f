"""Attention for clients over the fake engine, a call at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attend_promises import random_rows, run_all
from latentd.operations import AttendDone, OpenDone, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fakes import FakeEngine
    from latentd.operations import OpenRequest

GREEDY = SamplingParams(seed=0)


def open_empty(engine: FakeEngine) -> OpenRequest:
    request = engine.admit_open([], GREEDY, False)
    assert isinstance(run_all(engine)[-1], OpenDone)
    return request


def seats(*rows: tuple[OpenRequest, int]) -> list[tuple[int, int, int]]:
    return [(slot.slot_id, slot.epoch, pos) for slot, pos in rows]


def attend(
    engine: FakeEngine, layer: int, rows: Sequence[tuple[OpenRequest, int]], seed: int
) -> AttendDone:
    engine.admit_attend(layer, seats(*rows), *random_rows(engine, len(rows), seed))
    (done,) = run_all(engine)
    assert isinstance(done, AttendDone)
    engine.slots.check()
    return done


def fill(engine: FakeEngine, slot: OpenRequest, length: int, seed: int = 0) -> None:
    """All layers of the first positions, eight at a time."""
    start = engine.slots.slots[slot.slot_id].length
    for first in range(start, length, 8):
        rows = [(slot, pos) for pos in range(first, min(first + 8, length))]
        for layer in range(engine.info.layers):
            attend(engine, layer, rows, seed + first)
