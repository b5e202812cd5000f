"""Reference of the first and last nodes of a step: the ring entry in, its results out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from latentd_kernels.geometry import num_splits
from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from torch import Tensor

_ROW_FIELDS = (
    "token_ids",
    "slot_idx",
    "context_len",
    "kv_row",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
)


class ReferenceSteps(ReferenceBase):
    """stage, zero_pages and publish."""

    def stage(self, rows: int, heads: int = 0, chunk: bool = False) -> None:
        """Fill StepInputs from this step's ring entry (see `Ops.stage`). The reference attends row
        by row and needs no plan."""
        self.ring.start_ns[0] = time.perf_counter_ns()
        entry, inputs = self.ring.entry(int(self.ring.step_counter)), self.inputs
        for name in _ROW_FIELDS:
            getattr(inputs, name).numpy()[:rows] = getattr(entry, name)[:rows]
        token_ids, slot_idx = inputs.token_ids.numpy()[:rows], inputs.slot_idx.numpy()[:rows]
        ahead = (token_ids < 0) & (slot_idx >= 0)
        token_ids[ahead] = inputs.last_token.numpy()[slot_idx[ahead]]
        inputs.seed.numpy()[:rows] = entry.seed[:rows].view("<i8")
        table = inputs.block_table.numpy()
        for slot, first, count, page in entry.updates[: int(entry.num_updates[0])].tolist():
            table[slot, first : first + count] = page
        zeroes = int(entry.num_zero_pages[0])
        inputs.zero_pages.numpy()[:zeroes] = entry.zero_pages[:zeroes]
        inputs.num_zero_pages[0] = zeroes
        start = inputs.split_start.numpy()
        start[0] = 0
        for row, context_len in enumerate(entry.context_len[:rows].tolist()):
            start[row + 1] = start[row] + num_splits(context_len)

    def zero_pages(self, slab: Tensor) -> None:
        """Zero the pages that this step claims."""
        for page in self.inputs.zero_pages[: int(self.inputs.num_zero_pages)].tolist():
            slab[page].zero_()

    def publish(self, rows: int) -> None:
        """Write results, then the step number, and advance the counter."""
        step = int(self.ring.step_counter)
        entry = self.ring.entry(step)
        entry.tokens[:rows] = self.ring.tokens[:rows].numpy()
        entry.logprobs[:rows] = self.ring.logprobs[:rows].numpy()
        entry.start_ns[0], entry.end_ns[0] = int(self.ring.start_ns), time.perf_counter_ns()
        entry.step[0] = step + 1
        torch.add(self.ring.step_counter, 1, out=self.ring.step_counter)
