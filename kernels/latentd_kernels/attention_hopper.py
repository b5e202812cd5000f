"""Launches of the sm_90a attention kernels, f32 mode: csrc/hopper/{absorb,attend*,expand*}.cu.

What enters the arithmetic of a row (its splits and chains) follows from the model and the row; a
kernel's form, and its grid, may follow the number of rows.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.attention_maps import (
    PAGE_PARTS,
    AttendCall,
    node_map,
    page_map,
    query_map,
    row_query_map,
)
from latentd_kernels.attention_shapes import MAX_CALL_ROWS, of_layers
from latentd_kernels.expand_forms import expand_form
from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROPE_DIM, ROW_DIM
from latentd_kernels.head_tiles import (
    ANY_HEADS,
    ANY_TILES,
    WIDE_TILE,
    most_heads,
    num_shares,
    share_ctas,
)
from latentd_kernels.launcher import Launcher
from latentd_kernels.row_tiles import TILE_COLUMNS, chunk_heads, row_tile

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.layer_weights import LayerWeights
    from latentd_kernels.ops import AttentionWorkspace


_NO_APPEND: Final[list[Argument]] = [None, c_int64(0), None, c_float(0.0), None, c_int32(0)]


def attend_smem(tile: int) -> int:
    """Bytes of attend's shared memory for `tile` heads, with room to align (attend.cuh, Smem)."""
    page, query, probs, exchange = 2 * PAGE_SIZE * ROW_DIM * 2, tile * ROW_DIM * 2, tile * 128, 256
    node = tile * (LATENT_DIM * 2 + 16) if tile == 16 else 16
    small = tile * (16 + 16 + 4 + 4 + 8 + 8)
    plans, barriers = 2 * 32, 9 * 8
    size = page + query + probs + node + exchange * tile + small + plans + barriers
    return 1024 + -(-size // 16) * 16


WIDE_SMEM: Final = 3 * 9 * 8192 + 4912
"""Bytes of attend_wide's shared memory: sizeof(Smem) in attend_wide_pages.cuh."""


class HopperAttention(Launcher):
    """absorb, attend and expand of `Ops` for f32 mode on sm_90a; arguments are checked already."""

    def hopper_absorb(
        self,
        q: Tensor,
        stride: int,
        kv_b: Tensor | LayerWeights,
        rope: list[Argument],
        out: Tensor,
        rows: int,
        append: list[Argument] | None = None,
    ) -> None:
        """One launch for any number of rows. It appends them too, with the arguments of `append`:
        kv, its row stride, norm weight, eps, slab and layer."""
        heads = out.shape[1]
        nope_dim = q.shape[1] // heads - ROPE_DIM
        weight, of_layer = of_layers(kv_b, self.inputs.token_ids)
        v_dim = weight.shape[0] // heads - nope_dim
        cta_rows = 8 if rows <= 8 else 16 if rows <= 16 else 64
        columns = 128 if cta_rows == 64 else 64
        args: list[Argument] = [q, c_int64(stride), weight, *rope, self.inputs.context_len]
        args += [out, c_int32(rows), c_int32(v_dim)]
        kv, kv_stride, norm_weight, eps, slab, layer = append or _NO_APPEND
        args += [kv, kv_stride, norm_weight, eps, self.inputs.kv_row, slab, layer, *of_layer]
        rope_ctas = -(-16 * min(rows, cta_rows) // columns)
        grid = (LATENT_DIM // columns + rope_ctas, heads, -(-rows // cta_rows))
        if cta_rows == 8 and heads < 64:
            form, smem = "direct", 0
        else:
            form, smem = f"r{cta_rows}", 2 * (nope_dim * (columns + 8) + cta_rows * (nope_dim + 32))
        name = f"absorb_hopper_{nope_dim}_{form}"
        self.library.launch(name, grid, 2 * columns, args, stream=self.stream, smem=smem)

    def hopper_attend(self, call: AttendCall) -> None:
        """One launch that follows the call's part of the work list."""
        if call.first_row % MAX_CALL_ROWS:
            raise ValueError(f"first_row {call.first_row}: expected a multiple of {MAX_CALL_ROWS}")
        heads, maps, num_ctas = call.heads, self.tensor_maps, self.num_ctas
        tile = most_heads(heads)
        if tile >= WIDE_TILE:
            self._attend_wide(call)
            return
        tile_rows = row_tile(heads, call.rows) if call.chunk else 1
        if tile_rows > 1:
            tile, row_heads = TILE_COLUMNS, chunk_heads(heads)
            queries = [query_map(maps, call, row_heads, tile_rows)]
            name = f"attend_chunk_{row_heads}"
        elif heads >= ANY_HEADS:
            queries = [row_query_map(maps, call, most) for most in ANY_TILES]
            tile, name = ANY_TILES[-1], "attend_hopper_any"
        else:
            queries = [row_query_map(maps, call, tile)]
            name = f"attend_hopper_{tile}"
        args: list[Argument] = [*queries]
        args += [page_map(maps, call, boxes) for boxes in PAGE_PARTS]
        args += self._plan_args(call, num_ctas)
        args += [call.workspace.partial_o, call.workspace.partial_ml]
        args += self._size_args(call)
        args.append(c_float(call.softmax_scale * math.log2(math.e)))
        smem = attend_smem(tile)
        grid = (num_ctas, 1, 1)
        self.library.launch(name, grid, 256, args, stream=self.stream, smem=smem)

    def _attend_wide(self, call: AttendCall) -> None:
        groups = share_ctas(most_heads(call.heads))
        shares, maps = num_shares(call.heads, self.num_ctas), self.tensor_maps
        args: list[Argument] = []
        args += [row_query_map(maps, call, WIDE_TILE, boxes) for boxes in PAGE_PARTS]
        args += [page_map(maps, call, boxes) for boxes in PAGE_PARTS]
        args.append(node_map(maps, call.workspace.partial_o))
        args += self._plan_args(call, shares)
        args += [call.workspace.partial_ml, *self._size_args(call), c_int32(groups)]
        args.append(c_float(call.softmax_scale * math.log2(math.e)))
        grid, cluster, name = (shares * groups, 1, 1), (groups, 1, 1), "attend_hopper_wide"
        self.library.launch(
            name, grid, 384, args, stream=self.stream, smem=WIDE_SMEM, cluster=cluster
        )

    def _plan_args(self, call: AttendCall, shares: int) -> list[Argument]:
        """Block table, plans of the rows, and the call's part of a work list of so many shares."""
        inputs, first_share = self.inputs, call.first_row // MAX_CALL_ROWS * shares
        return [inputs.block_table, inputs.row_plan[call.first_row :], inputs.work[first_share:]]

    def _size_args(self, call: AttendCall) -> list[Argument]:
        max_pages = self.inputs.block_table.shape[1]
        return [c_int32(max_pages), c_int32(call.rows), c_int32(call.heads)]

    def hopper_expand(
        self, workspace: AttentionWorkspace, kv_b: Tensor | LayerWeights, out: Tensor,
        first_row: int, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """One launch."""
        heads = workspace.partial_o.shape[1]
        weight, of_layer = of_layers(kv_b, self.inputs.token_ids)
        v_dim = weight.shape[0] // heads - nope_dim
        form = expand_form(rows, heads, v_dim)
        args: list[Argument] = [workspace.partial_o, workspace.partial_ml]
        args += [self.inputs.row_plan[first_row:], weight, out[first_row:]]
        args += [c_int32(rows), c_int32(form.cta_rows), c_int32(nope_dim), c_int32(v_dim)]
        args += of_layer
        grid = (v_dim // form.values, heads, -(-rows // form.cta_rows))
        self.library.launch(form.name, grid, form.threads, args, stream=self.stream, smem=form.smem)
