"""Reference of the operations that take rows of attention from a client and give the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd_kernels.geometry import ROW_DIM, num_pages
from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.attend_rows import AttendRing


class ReferenceAttendRows(ReferenceBase):
    """take_rows, store_rows and give_rows."""

    def take_rows(self, ring: AttendRing, layers: int, rows: int) -> None:
        """See `Ops.take_rows`."""
        entry = int(self.ring.step_counter) % len(ring.host_q)
        ring.q[:rows] = ring.host_q[entry, :rows]
        ring.kv[:rows] = ring.host_kv[entry, :rows]
        inputs = self.inputs
        for row in range(rows):
            slot, pages = int(inputs.slot_idx[row]), num_pages(int(inputs.context_len[row]))
            if slot < 0:
                continue
            mapped = inputs.block_table[slot, :pages]
            shifted = mapped * layers + inputs.token_ids[row]
            ring.table[slot, :pages] = torch.where(mapped < 0, -1, shifted)

    def store_rows(self, ring: AttendRing, slab: Tensor, rows: int) -> None:
        """See `Ops.store_rows`."""
        cache = slab.view(-1, ROW_DIM)
        for row, place in enumerate(self.inputs.kv_row[:rows].tolist()):
            if place >= 0:
                cache[place] = ring.kv[row]

    def give_rows(self, ring: AttendRing, rows: int) -> None:
        """See `Ops.give_rows`."""
        entry = int(self.ring.step_counter) % len(ring.host_o)
        ring.host_o[entry, :rows] = ring.o[:rows]
