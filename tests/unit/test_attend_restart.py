"""What is left of attention for clients in a slot that a snapshot has brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import saving_promises
from attend_calls import attend, fill, open_empty
from fakes import FakeEngine
from latentd_client.errors import RequestRejected
from scenarios import Tracked

if TYPE_CHECKING:
    from pathlib import Path

    from latentd.operations import OpenRequest


def restart(source: FakeEngine, slot: OpenRequest, folder: Path) -> FakeEngine:
    """Another engine with the slot of the first."""
    target = FakeEngine()
    length = source.slots.slots[slot.slot_id].length
    saving_promises.hand_over(source, [Tracked(slot, length, None, b"")], target, folder)
    return target


def test_the_request_that_completed_a_position_is_answered_again(tmp_path: Path) -> None:
    source = FakeEngine()
    slot = open_empty(source)
    fill(source, slot, 62)
    rows = [(slot, 62), (slot, 63), (slot, 64)]
    attend(source, 0, rows, 5)
    done = attend(source, 1, rows, 6)
    target = restart(source, slot, tmp_path)
    again = attend(target, 1, rows, 6)
    assert np.array_equal(done.o, again.o)
    assert again.lengths == [65] * 3
    with pytest.raises(RequestRejected) as refusal:
        attend(target, 1, rows, 7)
    assert refusal.value.code == "position_conflict"
    fill(target, slot, 70)


def test_a_position_in_progress_begins_again(tmp_path: Path) -> None:
    source = FakeEngine()
    slot = open_empty(source)
    fill(source, slot, 5)
    attend(source, 0, [(slot, 5)], 1)
    target = restart(source, slot, tmp_path)
    with pytest.raises(RequestRejected, match=r"layer 1 .* came before layer 0"):
        attend(target, 1, [(slot, 5)], 1)
    fill(target, slot, 6)
