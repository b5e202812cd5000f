"""Slots and the block-table mirror against plain lists, with a device table made of updates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentd.operations import SamplingParams
from latentd.pages import PagePool
from latentd.slots import SlotTable
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import num_pages

GREEDY = SamplingParams(seed=0)
MAX_CTX = 300
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "extend", "extend", "cut", "free", "sync"]),
        st.integers(0, 3),
        st.integers(0, MAX_CTX),
    ),
    max_size=60,
)


@given(num_pages_total=st.integers(3, 16), operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_random_operations_keep_mirror_device_and_pool_in_step(
    num_pages_total: int, operations: list[tuple[str, int, int]]
) -> None:
    slots = SlotTable(4, MAX_CTX, PagePool(num_pages_total))
    device = np.full_like(slots.table, -1)
    lengths: dict[int, int] = {}
    for name, slot_id, length in operations:
        slot = slots.slots[slot_id]
        if name == "take":
            if len(lengths) == 4:
                with pytest.raises(RequestRejected):
                    slots.take(GREEDY)
            else:
                lengths[slots.take(GREEDY).slot_id] = 0
        elif name == "extend" and slot_id in lengths and length >= lengths[slot_id]:
            before = slots.table.copy()
            if num_pages(length) - len(slot.pages) > slots.pool.num_free:
                with pytest.raises(RequestRejected, match="are free"):
                    slots.extend(slot, length)
                assert (slots.table == before).all()
            else:
                slots.extend(slot, length)
                lengths[slot_id] = slot.length = length
        elif name == "cut" and slot_id in lengths and length <= lengths[slot_id]:
            lengths[slot_id] = slot.length = length
            slots.cut(slot, length)
        elif name == "free" and slot_id in lengths:
            del lengths[slot_id]
            slots.free(slot)
        elif name == "sync":
            updates, zero = slots.take_updates()
            assert len(updates) <= len(zero) + slots.max_slots
            assert len(set(zero)) == len(zero)
            for row, first, count, page in updates:
                device[row, first : first + count] = page
            assert (device == slots.table).all()
        slots.check()
        assert slots.num_used == len(lengths)
        for used, tokens in lengths.items():
            assert len(slots.slots[used].pages) == num_pages(tokens)


def test_an_epoch_is_never_used_twice() -> None:
    slots = SlotTable(1, 64, PagePool(1))
    epochs = set()
    for _ in range(1000):
        slot = slots.take(GREEDY)
        assert 0 < slot.epoch < 1 << 63
        epochs.add(slot.epoch)
        slots.free(slot)
    assert len(epochs) == 1000


def test_a_closed_epoch_is_gone() -> None:
    slots = SlotTable(2, 64, PagePool(2))
    slot = slots.take(GREEDY)
    epoch = slot.epoch
    assert slots.get(slot.slot_id, epoch) is slot
    slots.free(slot)
    for slot_id, number in ((slot.slot_id, epoch), (slot.slot_id, 0), (7, epoch), (-1, epoch)):
        with pytest.raises(RequestRejected) as refusal:
            slots.get(slot_id, number)
        assert refusal.value.code == "epoch_gone"


def test_only_newly_mapped_pages_are_zeroed() -> None:
    slots = SlotTable(1, 256, PagePool(4))
    slot = slots.take(GREEDY)
    slots.extend(slot, 65)
    assert slots.take_updates() == ([(0, 0, 1, 0), (0, 1, 1, 1)], [0, 1])
    slots.extend(slot, 129)
    assert slots.take_updates() == ([(0, 2, 1, 2)], [2])
    slots.cut(slot, 10)  # the kept page is partly filled and must not be zeroed
    slots.extend(slot, 65)
    updates, zero = slots.take_updates()
    assert updates == [(0, 1, 1, slot.pages[1]), (0, 2, 1, -1)]
    assert zero == [slot.pages[1]]
    assert slots.take_updates() == ([], [])
