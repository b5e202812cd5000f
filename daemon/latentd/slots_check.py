"""What must hold of the slots, the block table and the page pool after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.slots import SlotTable


def check_slots(table: SlotTable) -> None:
    """Raise AssertionError unless every row is a slot's pages and then -1, every owner is a slot,
    and no page is owned without a slot."""
    table.pool.check()
    owners = [0] * table.pool.num_pages
    for slot in table.slots:
        have, who = len(slot.pages), f"slot {slot.slot_id}"
        row = table.table[slot.slot_id]
        assert row[:have].tolist() == slot.pages, f"{who}: the table differs"
        assert (row[have:] == -1).all(), f"{who}: the tail is not -1"
        assert slot.length <= have * PAGE_SIZE, f"{who}: tokens without a page"
        assert slot.epoch or not have, f"{who}: a free slot owns pages"
        assert slot.synced <= min(have, slot.mapped), f"{who}: sync is ahead"
        for page in slot.pages:
            owners[page] += 1
    for page, count in enumerate(owners):
        assert count == table.pool.owners(page), f"page {page} has a lost owner"
    free = [slot.slot_id for slot in table.slots if not slot.epoch]
    assert sorted(table.free_seats) == free, "the list of free slots differs"
