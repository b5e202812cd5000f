"""Pages that several slots own: fork, and the copy before somebody writes into such a page.

A full page is never written again, so any number of slots may read it. What a slot appends to is
its own page alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.operations import SamplingParams
    from latentd.slots import Slot, SlotTable


class Sharing:
    """Shares pages between the slots of one table."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self.pool = slots.pool

    def fork(self, source: Slot, sampling: SamplingParams) -> Slot:
        """Seat a sequence with the tokens of an idle one. Full pages get one owner more, the last,
        partly filled one is copied. Raises RequestRejected("no_slot", "no_pages") and changes
        nothing."""
        full, rest = divmod(source.length, PAGE_SIZE)
        slot = self.slots.take(sampling)
        try:
            copy = self.pool.claim(1) if rest else []
        except RequestRejected:
            self.slots.free(slot)
            raise
        shared = source.pages[:full]
        for page in shared:
            self.pool.share(page)
        self.slots.append_filled(slot, shared + copy, source.pages[full] if copy else -1)
        slot.length, slot.token = source.length, source.token
        return slot

    def own(self, slot: Slot) -> None:
        """Make a slot that was truncated the only owner of the page that it will append to, by a
        copy if need be. Raises RequestRejected("no_pages") and changes nothing."""
        full, rest = divmod(slot.length, PAGE_SIZE)
        assert len(slot.pages) == full + (rest > 0), "a borrowed page is the last one"
        if rest and self.pool.owners(slot.pages[full]) > 1:
            copy = self.pool.claim(1)
            source = slot.pages.pop()
            slot.synced = full
            self.pool.release([source])
            self.slots.append_filled(slot, copy, source)
        slot.borrowed = False
