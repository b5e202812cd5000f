"""Slots and the block-table mirror against plain lists, with a device table made of updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentd.changes import NO_CHANGES, Changes
from latentd.operations import SamplingParams
from latentd.pages import PagePool
from latentd.sharing import Sharing
from latentd.slots import SlotTable
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from latentd.slots import Slot

GREEDY = SamplingParams(seed=0)
MAX_CTX = 300
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "extend", "extend", "fork", "cut", "free", "sync"]),
        st.integers(0, 3),
        st.integers(0, MAX_CTX),
    ),
    max_size=60,
)


class Device:
    """The device's block table and slab as moves and updates make them; a page holds one word for
    each of its tokens."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self.table = np.full_like(slots.table, -1)
        self.slab = np.zeros((slots.pool.num_pages, PAGE_SIZE), np.int64)

    def sync(self) -> None:
        """What a step does before it runs."""
        updates, zero, moves, _ = self.slots.changes.take()
        assert len(updates) <= len(zero) + self.slots.max_slots
        assert len(set(zero)) == len(zero)
        if moves is not None:
            for source, target in moves.copies:
                self.slab[target] = self.slab[source]
            for row, first, pages in moves.rows:
                self.table[row, first : first + len(pages)] = pages
        for row, first, count, page in updates:
            self.table[row, first : first + count] = page
        self.slab[zero] = 0
        assert (self.table == self.slots.table).all()

    def write(self, slot: Slot, words: list[int]) -> None:
        """Append to a slot that has the pages."""
        for word in words:
            page = self.table[slot.slot_id, slot.length // PAGE_SIZE]
            self.slab[page, slot.length % PAGE_SIZE] = word
            slot.tokens[slot.length] = word
            slot.length += 1

    def read(self, slot: Slot) -> list[int]:
        """All words of a slot."""
        words = self.slab[self.table[slot.slot_id, : len(slot.pages)]].ravel()
        return [int(word) for word in words[: slot.length]]


@given(num_pages_total=st.integers(3, 16), operations=OPERATIONS)
@settings(max_examples=150)
def test_random_operations_keep_mirror_device_and_pool_in_step(
    num_pages_total: int, operations: list[tuple[str, int, int]]
) -> None:
    slots = SlotTable(4, MAX_CTX, PagePool(num_pages_total))
    device, sharing = Device(slots), Sharing(slots)
    held: dict[int, list[int]] = {}
    for serial, (name, slot_id, length) in enumerate(operations):
        slot = slots.slots[slot_id]
        if name == "take":
            if len(held) == 4:
                with pytest.raises(RequestRejected):
                    slots.take(GREEDY)
            else:
                held[slots.take(GREEDY).slot_id] = []
        elif name == "fork" and slot_id in held and len(held) < 4:
            if slot.length % PAGE_SIZE and not slots.pool.num_free:
                with pytest.raises(RequestRejected, match="are free"):
                    sharing.fork(slot, GREEDY)
            else:
                held[sharing.fork(slot, GREEDY).slot_id] = list(held[slot_id])
        elif name == "extend" and slot_id in held and length >= slot.length:
            before = slots.table.copy()
            try:
                sharing.own(slot)
                before = slots.table.copy()
                slots.extend(slot, length)
            except RequestRejected:
                assert (slots.table == before).all()
            else:
                words = [1000 * serial + n for n in range(length - slot.length)]
                device.sync()
                device.write(slot, words)
                held[slot_id] += words
        elif name == "cut" and slot_id in held and length <= slot.length:
            slots.truncate(slot, length)
            del held[slot_id][length:]
        elif name == "free" and slot_id in held:
            del held[slot_id]
            slots.free(slot)
        elif name == "sync":
            device.sync()
        slots.check()
        assert slots.num_used == len(held)
        for used, words in held.items():
            assert len(slots.slots[used].pages) == num_pages(len(words))
    device.sync()
    for used, words in held.items():
        assert device.read(slots.slots[used]) == words


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
    assert slots.changes.take() == Changes([(0, 0, 1, 0), (0, 1, 1, 1)], [0, 1])
    slots.extend(slot, 129)
    assert slots.changes.take() == Changes([(0, 2, 1, 2)], [2])
    slots.cut(slot, 10)  # the kept page is partly filled and must not be zeroed
    slots.extend(slot, 65)
    updates, zero, _, _ = slots.changes.take()
    assert updates == [(0, 1, 1, slot.pages[1]), (0, 2, 1, -1)]
    assert zero == [slot.pages[1]]
    assert slots.changes.take() is NO_CHANGES
