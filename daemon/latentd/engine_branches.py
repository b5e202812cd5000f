"""Truncate and fork: what changes the pages of idle slots and launches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.engine_admission import Admission
    from latentd.operations import SamplingParams
    from latentd.sharing import Sharing
    from latentd.slots import Slot, SlotTable


class Branches:
    """Takes slots back and splits them, or raises RequestRejected and changes nothing."""

    def __init__(self, slots: SlotTable, sharing: Sharing, admission: Admission) -> None:
        self.slots = slots
        self.sharing = sharing
        self.admission = admission

    def truncate(self, slot_id: int, epoch: int, pos: int, to: int) -> int:
        """Drop the tokens from `to` on and give their pages back."""
        slot = self.admission.idle_slot(slot_id, epoch, pos)
        if not 0 <= to <= pos:
            raise RequestRejected("invalid", f"to is {to}, must be 0 to {pos} (the length)")
        self.slots.truncate(slot, to)
        return to

    def fork(self, slot_id: int, epoch: int, pos: int, sampling: SamplingParams | None) -> Slot:
        """Seat a sequence with the same tokens; without a seed in `sampling` it draws its own."""
        source = self.admission.idle_slot(slot_id, epoch, pos)
        params = source.sampling
        if sampling is not None:
            sampling.validate()
            params = sampling.seeded()
        assert params is not None
        if pos % PAGE_SIZE:
            self.admission.room.check("a fork", 1)
        return self.admission.patiently(lambda: self.sharing.fork(source, params))
