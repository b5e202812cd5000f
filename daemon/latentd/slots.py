"""Slots: a sequence's seat, its pages, and the host's mirror of the block table.

Plain Python and numpy. What of it the device must know waits in `changes` for the next launch.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from latentd.changes import PendingChanges
from latentd.slots_check import check_slots
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd.attending import Attended, Written
    from latentd.limits import Limits
    from latentd.operations import SamplingParams
    from latentd.pages import PagePool


class Slot:
    """One live sequence. `tokens` begins with those appended, `length` is their number, `token` is
    the last sampled one. `chain` holds a digest of its beginning and of each full page; it is empty
    without a prefix cache."""

    __slots__ = ("attended", "borrowed", "chain", "epoch", "length", "limits", "mapped", "pages",
                 "sampling", "slot_id", "synced", "task", "token", "tokens", "written")  # fmt: skip

    def __init__(self, slot_id: int, tokens: memoryview) -> None:
        self.slot_id = slot_id
        self.epoch = 0  # 0: the seat is free
        self.length = 0
        self.tokens = tokens
        self.chain: list[bytes] = []
        self.pages: list[int] = []
        self.token: int | None = None
        self.sampling: SamplingParams | None = None  # with its seed; set by take()
        self.limits: Limits | None = None  # that the device's sampler has, or gets next
        self.task: object | None = None  # the operation that runs on it, set by the engine
        self.synced = 0  # leading entries that the device's block table holds too
        self.mapped = 0  # entries of the device's row that are not -1
        self.attended: Attended | None = None  # its last positions, where a client attends
        self.written: Written | None = None  # what it holds of the next ones
        self.borrowed = False  # the last, partly filled page may be others' too: see Sharing.own


def _draw_prefix() -> int:
    return (secrets.randbits(31) or 1) << 32


class SlotTable:
    """All seats of the daemon and their rows of the block table."""

    def __init__(self, max_slots: int, max_ctx: int, pool: PagePool) -> None:
        self.max_slots = max_slots
        self.max_ctx = max_ctx
        self.max_pages = num_pages(max_ctx)
        self.pool = pool
        self.tokens = np.zeros((max_slots, max_ctx), np.int32)  # takes memory where it is written
        self.slots = [Slot(slot_id, self.tokens[slot_id].data) for slot_id in range(max_slots)]
        self.table = np.full((max_slots, self.max_pages), -1, np.int32)  # the host's mirror
        self.free_seats = list(range(max_slots - 1, -1, -1))
        self.changes = PendingChanges()
        self.full: list[Slot] = []
        """Slots of which a page has become full; whoever takes note of that empties it."""
        self.note_full: Callable[[], None] = self.full.clear
        # 31 random bits above a counter with a random start: never the same twice in a process,
        # and not repeated by the next one.
        self._epoch_prefix = _draw_prefix()
        self._epoch_count = secrets.randbits(32)

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self.max_slots - len(self.free_seats)

    def take(self, sampling: SamplingParams) -> Slot:
        """Seat a new, empty sequence. Raises RequestRejected("no_slot")."""
        if not self.free_seats:
            raise RequestRejected(
                "no_slot", f"all {self.max_slots} slots are in use; close one or retry later",
                slots_total=self.max_slots,
            )  # fmt: skip
        slot = self.slots[self.free_seats.pop()]
        self._epoch_count = (self._epoch_count + 1) & 0xFFFF_FFFF
        slot.epoch = self._epoch_prefix | self._epoch_count
        slot.sampling = sampling
        return slot

    def take_back(self, slot_id: int, epoch: int, sampling: SamplingParams) -> Slot:
        """Seat an empty sequence where it sat in an earlier life, under its epoch."""
        self.free_seats.remove(slot_id)
        slot = self.slots[slot_id]
        slot.epoch, slot.sampling = epoch, sampling
        while self._epoch_prefix == epoch >> 32 << 32:  # no epoch comes twice
            self._epoch_prefix = _draw_prefix()
        return slot

    def get(self, slot_id: int, epoch: int) -> Slot:
        """The live slot of that epoch. Raises RequestRejected("epoch_gone")."""
        if 0 <= slot_id < self.max_slots and epoch > 0:
            slot = self.slots[slot_id]
            if slot.epoch == epoch:
                return slot
        raise RequestRejected(
            "epoch_gone", f"slot {slot_id} of epoch {epoch} is not open (any more)"
        )

    def extend(self, slot: Slot, length: int) -> None:
        """Own pages for `length` tokens. Raises RequestRejected("no_pages") and changes nothing."""
        have = len(slot.pages)
        if length <= have * PAGE_SIZE:
            return
        missing = num_pages(length) - have
        pages = self.pool.claim(missing)
        slot.pages += pages
        self.table[slot.slot_id, have : have + missing] = pages
        self.changes.note(slot)

    def append_filled(self, slot: Slot, pages: Sequence[int], copied_from: int = -1) -> None:
        """Append pages that the caller owns and others have filled; the last of them is first
        copied from another one, if that is named. Slots without pages to be zeroed only."""
        if not pages:
            return
        first = len(slot.pages)
        assert slot.synced == first, f"slot {slot.slot_id} has pages that nothing has filled"
        slot.pages += pages
        row = self.table[slot.slot_id, first : len(slot.pages)]
        row[:] = pages
        self.changes.move(slot, first, row.copy(), copied_from)
        slot.synced = len(slot.pages)
        slot.mapped = max(slot.mapped, slot.synced)

    def cut(self, slot: Slot, length: int) -> None:
        """Give back the pages behind the first `length` tokens."""
        keep = num_pages(length)
        if keep >= len(slot.pages):
            return
        if slot.written is not None and slot.written.ends[0] > keep * PAGE_SIZE:
            slot.written = None
        self.pool.release(reversed(slot.pages[keep:]))
        del slot.pages[keep:]
        self.table[slot.slot_id, keep:] = -1
        slot.synced = min(slot.synced, keep)
        self.changes.note(slot)

    def limit(self, slot: Slot, limits: Limits | None) -> None:
        """Have all rows of the slot from now on sampled within these limits."""
        slot.limits = limits
        self.changes.limit(slot)

    def truncate(self, slot: Slot, length: int) -> None:
        """Drop the tokens behind the first `length`, and the last sampled one."""
        if self.full:
            self.note_full()
        slot.length, slot.token = length, None
        slot.attended = slot.written = None
        slot.borrowed = length % PAGE_SIZE > 0
        del slot.chain[1 + length // PAGE_SIZE :]
        self.cut(slot, length)

    def free(self, slot: Slot) -> None:
        """End the epoch, give back all pages and the seat."""
        self.truncate(slot, 0)
        if slot.limits is not None:
            self.limit(slot, None)
        slot.epoch = 0
        slot.sampling = slot.task = None
        slot.chain = []
        self.free_seats.append(slot.slot_id)

    def check(self) -> None:
        """Raise AssertionError unless pool, pages, tokens and table agree."""
        check_slots(self)
