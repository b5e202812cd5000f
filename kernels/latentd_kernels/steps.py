"""Launches of the first and last nodes of a step; csrc/staging.cu computes them."""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.head_tiles import most_heads, num_shares
from latentd_kernels.launcher import Launcher
from latentd_kernels.row_tiles import row_tile
from latentd_kernels.work_plan import num_calls

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument

_STAGE_THREADS: Final = 512
_ZERO_THREADS: Final = 256


class StepLaunches(Launcher):
    """stage, zero_pages and publish."""

    def _ring_args(self) -> list[Argument]:
        ring, layout = self.ring, self.ring.layout
        sizes = (layout.entries, layout.row_capacity, layout.max_updates, layout.zero_capacity)
        return [ring.host, ring.step_counter, *map(c_int64, sizes), ring.start_ns]

    def stage(self, rows: int, heads: int = 0, chunk: bool = False) -> None:
        """See `Ops.stage`."""
        inputs = self.inputs
        last_rows = rows - (num_calls(rows) - 1) * MAX_CALL_ROWS
        args: list[Argument] = [
            *self._ring_args(),
            inputs.last_token,
            inputs.token_ids,
            inputs.slot_idx,
            inputs.context_len,
            inputs.top_k,
            inputs.temperature,
            inputs.top_p,
            inputs.min_p,
            inputs.kv_row,
            inputs.seed,
            inputs.split_start,
            inputs.block_table,
            inputs.zero_pages,
            inputs.num_zero_pages,
            c_int32(rows),
            c_int32(inputs.block_table.shape[1]),
            c_int32(heads if self.plans_work else 0),
            c_int32(most_heads(heads)),
            c_int32(row_tile(heads, MAX_CALL_ROWS) if chunk else 1),
            c_int32(row_tile(heads, last_rows) if chunk else 1),
            c_int32(num_shares(heads, self.num_ctas)),
            inputs.row_plan,
            inputs.work,
        ]
        self.library.launch("stage", (1, 1, 1), _STAGE_THREADS, args, stream=self.stream)

    def zero_pages(self, slab: Tensor) -> None:
        """See `Ops.zero_pages`."""
        page_vectors = c_int64(slab[0].numel() * slab.element_size() // 16)
        args: list[Argument] = [
            slab,
            self.inputs.zero_pages,
            self.inputs.num_zero_pages,
            page_vectors,
        ]
        grid = (self.library.sm_count, 1, 1)
        # A full edge: what stage wrote may be read before the wait by every kernel behind this one.
        self.library.launch("zero_pages", grid, _ZERO_THREADS, args, stream=self.stream, pdl=False)

    def publish(self, rows: int) -> None:
        """See `Ops.publish`."""
        args: list[Argument] = [
            *self._ring_args(),
            self.ring.tokens,
            self.ring.logprobs,
            c_int32(rows),
        ]
        self.library.launch("publish", (1, 1, 1), _STAGE_THREADS, args, stream=self.stream)
