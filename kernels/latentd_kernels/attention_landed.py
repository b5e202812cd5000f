"""Launches of the landed chain on sm_90a: csrc/hopper/landed_*.cu.

A kernel's form and grid follow from the model, the rows and the GPU; none of them enters the
arithmetic of a row.
"""

from __future__ import annotations

from ctypes import c_float, c_int32
from typing import TYPE_CHECKING, Final

from latentd_kernels.attention_maps import PAGE_PARTS, AttendCall, page_map, query_map
from latentd_kernels.attention_shapes import of_layers
from latentd_kernels.geometry import PAGE_SIZE, max_splits
from latentd_kernels.launcher import Launcher

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.layer_weights import LayerWeights
    from latentd_kernels.ops import AttentionWorkspace

FEW_HEADS: Final = (32, 16)
"""Most heads of a CTA where there are few splits or chains (landed.cuh)."""
SUMS_SMEM: Final = {16: 176_528, 32: 203_664, 48: 230_800, 64: 225_168, 96: 205_712, 128: 227_216}
"""Shared memory of a CTA of the first pass, by its heads (landed_sums.cu)."""
OUTPUT_SMEM: Final = {16: 176_272, 32: 203_152, 48: 230_032, 64: 232_336}
"""The same of the second pass (landed_output.cu)."""
EXPAND_SMEM: Final = {64: 91_264, 128: 157_824}
"""Shared memory of an expand CTA, by the values of v that it serves (landed_expand.cu)."""
_ATTEND_THREADS: Final = 384
_EXPAND_THREADS: Final = 256
_EXPAND_ROWS: Final = 8


def sums_tile(heads: int) -> int:
    """Heads of a CTA of the first pass where units are many: one serves all."""
    return next(tile for tile in SUMS_SMEM if heads <= tile)


def output_tile(heads: int) -> int:
    """The same of the second pass: one serves all of up to 64, else two share them."""
    most = heads if heads <= 64 else -(-heads // 2)
    return next(tile for tile in OUTPUT_SMEM if most <= tile)


def chain_splits(heads: int) -> int:
    """Splits whose output the second pass sums in one go (landed.cuh)."""
    return 2 if heads < 64 else 4


class LandedAttention(Launcher):
    """attend and expand of `Ops` in landed mode on sm_90a; arguments are checked already."""

    def landed_attend(self, call: AttendCall) -> None:
        """Two launches: maxima and sums of all splits, then the output of all chains. The softmax
        scale is a bf16 number."""
        inputs, workspace = self.inputs, call.workspace
        heads, first_row = call.heads, call.first_row
        max_pages = inputs.block_table.shape[1]
        pages = [page_map(self.tensor_maps, call, boxes) for boxes in PAGE_PARTS]
        rest: list[Argument] = [inputs.block_table, inputs.slot_idx[first_row:]]
        rest += [inputs.context_len[first_row:], workspace.partial_o, workspace.partial_ml]
        rest += [c_int32(call.rows), c_int32(heads), c_int32(max_pages)]
        rest += [c_int32(max_splits(max_pages * PAGE_SIZE)), c_float(call.softmax_scale)]
        sums, output = sums_tile(heads), output_tile(heads)
        groups = -(-heads // output)
        ctas = self.library.sm_count
        for name, tile, grid, smem in (
            (f"landed_sums_{sums}", sums, ctas, SUMS_SMEM[sums]),
            (f"landed_output_{output}", output, ctas // groups * groups, OUTPUT_SMEM[output]),
        ):
            tiles = (tile, *(min(tile, few) for few in FEW_HEADS))
            queries = [query_map(self.tensor_maps, call, most) for most in tiles]
            args = [*queries, *pages, *rest]
            self.library.launch(
                name, (grid, 1, 1), _ATTEND_THREADS, args, stream=self.stream, smem=smem
            )

    def landed_expand(
        self, workspace: AttentionWorkspace, kv_b: Tensor | LayerWeights, out: Tensor,
        first_row: int, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """One launch."""
        heads = workspace.partial_o.shape[1]
        weight, of_layer = of_layers(kv_b, self.inputs.token_ids)
        v_dim = weight.shape[0] // heads - nope_dim
        row_splits = max_splits(self.inputs.block_table.shape[1] * PAGE_SIZE)
        # Few rows need many CTAs to read their chains, many rows should load W_UV seldom.
        tile, cta_rows = 128 if rows * heads >= 512 else 64, min(rows, _EXPAND_ROWS)
        args: list[Argument] = [workspace.partial_o, self.inputs.context_len[first_row:], weight]
        args += [out[first_row:], c_int32(rows), c_int32(heads), c_int32(nope_dim), c_int32(v_dim)]
        args += [c_int32(row_splits), c_int32(cta_rows), *of_layer]
        grid = (v_dim // tile, heads, -(-rows // cta_rows))
        self.library.launch(
            f"landed_expand_{tile}", grid, _EXPAND_THREADS, args, stream=self.stream,
            smem=EXPAND_SMEM[tile],
        )  # fmt: skip
