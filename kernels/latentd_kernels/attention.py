"""Launches of the attention kernels.

It chooses grids by the batch, which do not enter the arithmetic, and kernel forms by the model and
the GPU: a row has the same bits in every batch.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels import attention_shapes as shapes
from latentd_kernels.attention_hopper import HopperAttention
from latentd_kernels.attention_landed import LandedAttention
from latentd_kernels.attention_maps import AttendCall
from latentd_kernels.attention_workspace import workspace_items
from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROW_DIM

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.layer_weights import LayerWeights
    from latentd_kernels.ops import AttentionWorkspace, Rope

NARROW_SMEM: Final = 93_056
"""Shared memory of a CTA that serves 16 heads, sizeof(Narrow::Smem) in csrc/attention.cu."""
WIDE_SMEM: Final = 219_392
"""The same for 32 heads, sizeof(Wide::Smem): only sm_90 and sm_100 have that much."""


def expand_form(rows: int, heads: int, v_dim: int, sm_count: int) -> tuple[int, int]:
    """(threads, rows) of an expand CTA: the fewest rows with which all CTAs run at once (an SM
    holds 16 of these warps, a warp serves 8 values of v), at most 16. A row keeps 256 threads busy
    while its splits are combined."""
    for cta_rows in (1, 2, 4, 8):
        if v_dim // 8 * heads * -(-rows // cta_rows) <= 16 * sm_count:
            break
    else:
        cta_rows = 16
    return (256 if cta_rows == 1 else 512), cta_rows


class AttentionLaunches(HopperAttention, LandedAttention):
    """append, absorb, attend and expand of `Ops` on the GPU."""

    def append(
        self,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        rope: Rope | None,
        slab: Tensor,
        layer: int,
        rows: int,
    ) -> None:
        """See Ops.append. Raises ValueError for a slab, stride or layer that does not fit."""
        shapes.check_slab(slab, layer)
        stride = shapes.check_row_stride("kv", kv, ROW_DIM)
        args: list[Argument] = [kv, c_int64(stride), norm_weight, c_float(eps), *_rope_args(rope)]
        args += [self.inputs.kv_row, self.inputs.context_len, slab, c_int32(layer)]
        self.library.launch("append", (rows, 1, 1), 64, args, stream=self.stream)

    def absorb(
        self, q: Tensor, kv_b: Tensor | LayerWeights, rope: Rope | None, out: Tensor, rows: int,
        nope_dim: int,
    ) -> None:  # fmt: skip
        """See Ops.absorb; more rows than a call takes are done in several. Raises ValueError for
        head counts and widths that have no kernel."""
        heads = out.shape[1]
        weight, of_layer = shapes.of_layers(kv_b, self.inputs.token_ids)
        v_dim = shapes.head_widths(weight, heads, nope_dim)
        stride = shapes.check_row_stride("q", q, shapes.query_width(heads, nope_dim))
        if self.plans_work:
            self.hopper_absorb(q, stride, kv_b, _rope_args(rope), out, rows)
            return
        for first in range(0, rows, shapes.MAX_CALL_ROWS):
            num = min(rows - first, shapes.MAX_CALL_ROWS)
            args: list[Argument] = [q[first:], c_int64(stride), weight, *_rope_args(rope)]
            args += [self.inputs.context_len[first:], out[first:], c_int32(num), c_int32(v_dim)]
            args += of_layer
            smem = 2 * nope_dim * (64 + -(-num // 16) * 16)
            grid = (LATENT_DIM // 64 + -(-num // 16), heads, 1)
            self.library.launch(
                f"absorb_{nope_dim}", grid, 128, args, stream=self.stream, smem=smem
            )

    def append_absorb(
        self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope | None, slab: Tensor,
        layer: int, q: Tensor, kv_b: Tensor, out: Tensor, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """See Ops.append_absorb: one launch where the kernels follow a work list."""
        if not self.plans_work:
            self.append(kv, norm_weight, eps, rope, slab, layer, rows)
            self.absorb(q, kv_b, rope, out, rows, nope_dim)
            return
        shapes.check_slab(slab, layer)
        heads = out.shape[1]
        shapes.head_widths(kv_b, heads, nope_dim)
        stride = shapes.check_row_stride("q", q, shapes.query_width(heads, nope_dim))
        kv_stride = shapes.check_row_stride("kv", kv, ROW_DIM)
        append: list[Argument] = [kv, c_int64(kv_stride), norm_weight, c_float(eps), slab]
        append.append(c_int32(layer))
        self.hopper_absorb(q, stride, kv_b, _rope_args(rope), out, rows, append)

    def attend(
        self,
        q_abs: Tensor,
        slab: Tensor,
        layer: int,
        workspace: AttentionWorkspace,
        first_row: int,
        rows: int,
        softmax_scale: float,
        chunk: bool = False,
    ) -> None:
        """See Ops.attend: one launch in f32 mode, two in the landed chain. Raises ValueError for a
        slab, layer, head count or row count that does not fit."""
        shapes.check_rows(rows)
        shapes.check_slab(slab, layer)
        heads = q_abs.shape[1]
        if not 1 <= heads <= shapes.MAX_HEADS:
            raise ValueError(f"{heads} attention heads: 1 to {shapes.MAX_HEADS} fit")
        is_landed = self.numerics == "landed"
        scale = _landed(softmax_scale) if is_landed else softmax_scale
        call = AttendCall(q_abs, slab, layer, workspace, first_row, rows, scale, chunk)
        if self.plans_work:
            self.hopper_attend(call)
            return
        if self.lands_on_hopper:
            self.landed_attend(call)
            return
        inputs, layers, max_pages = self.inputs, slab.shape[1], self.inputs.block_table.shape[1]
        args: list[Argument] = [q_abs[first_row:], slab, inputs.block_table]
        args += [inputs.slot_idx[first_row:], inputs.context_len[first_row:]]
        args += [inputs.split_start[first_row:]]
        args += [workspace.partial_o, workspace.partial_ml]
        args += [c_int64(layers * PAGE_SIZE * ROW_DIM), c_int64(layer * PAGE_SIZE * ROW_DIM)]
        args += [c_int32(rows), c_int32(heads), c_int32(max_pages), c_float(scale)]
        form, smem, ctas = self._attend_form(rows, heads, max_pages)
        for name in ("attend_landed_sums", "attend_landed") if is_landed else ("attend_f32",):
            self.library.launch(
                f"{name}_{form}", (ctas, 1, 1), 256, args, stream=self.stream, smem=smem
            )

    def expand(
        self,
        workspace: AttentionWorkspace,
        kv_b: Tensor | LayerWeights,
        out: Tensor,
        first_row: int,
        rows: int,
        nope_dim: int,
    ) -> None:
        """See Ops.expand. Raises ValueError for shapes that have no kernel."""
        shapes.check_rows(rows)
        heads = workspace.partial_o.shape[1]
        weight, of_layer = shapes.of_layers(kv_b, self.inputs.token_ids)
        v_dim = shapes.head_widths(weight, heads, nope_dim)
        if self.plans_work:
            self.hopper_expand(workspace, kv_b, out, first_row, rows, nope_dim)
            return
        if self.lands_on_hopper:
            self.landed_expand(workspace, kv_b, out, first_row, rows, nope_dim)
            return
        threads, cta_rows = expand_form(rows, heads, v_dim, self.library.sm_count)
        args: list[Argument] = [workspace.partial_o, workspace.partial_ml]
        args += [self.inputs.split_start[first_row:]]
        args += [weight, out[first_row:], c_int32(rows), c_int32(nope_dim), c_int32(v_dim)]
        args += [c_int32(cta_rows), *of_layer]
        grid = (v_dim * 4 // threads, heads, -(-rows // cta_rows))
        name = "expand_landed" if self.numerics == "landed" else "expand_f32"
        self.library.launch(name, grid, threads, args, stream=self.stream)

    def _attend_form(self, rows: int, heads: int, max_pages: int) -> tuple[str, int, int]:
        """Kernel form, its shared memory and the number of CTAs: as many as can be resident, or
        as there can be units of work. The form follows from the model and the GPU alone: the two
        do not round alike."""
        is_wide = heads > 16 and self.library.max_smem >= WIDE_SMEM
        form, smem, tile = ("wide", WIDE_SMEM, 32) if is_wide else ("narrow", NARROW_SMEM, 16)
        units = workspace_items(rows, max_pages * PAGE_SIZE) * -(-heads // tile)
        resident = max(1, self.library.max_smem // (smem + 1024))
        return form, smem, min(units, resident * self.library.sm_count)


def _rope_args(rope: Rope | None) -> list[Argument]:
    """inv_freq (null without rope), magnitude and pair layout."""
    if rope is None:
        return [None, c_float(1.0), c_int32(0)]
    return [rope.inv_freq, c_float(rope.magnitude), c_int32(rope.interleaved)]


def _landed(scale: float) -> float:
    """The bf16 nearest to a softmax scale: the landed chain multiplies scores by it."""
    return float(torch.tensor(scale).to(torch.bfloat16))
