"""Latent attention in torch on the host, row by row: what the attention kernels compute.

Products and sums are float32; a value lands where the output's dtype (or, inside attend, the
query's) is bf16. Splits, landings and the meaning of -1 entries are those of the kernels; the
order inside a sum is torch's own, so the two backends share bounds, not bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd_kernels import attention_shapes as shapes
from latentd_kernels.geometry import (
    LATENT_DIM,
    PAGE_SIZE,
    ROPE_DIM,
    ROW_DIM,
    num_pages,
    pages_per_split,
)
from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.layer_weights import LayerWeights
    from latentd_kernels.ops import AttentionWorkspace, Rope


class ReferenceAttention(ReferenceBase):
    """append, absorb, attend and expand of `Ops` on the host."""

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
        """See Ops.append. Raises ValueError for a slab or layer that does not fit."""
        shapes.check_slab(slab, layer)
        cache = slab.view(-1, ROW_DIM)
        places = self.inputs.kv_row[:rows].tolist()
        positions = self.inputs.context_len[:rows].tolist()
        weight = norm_weight.float()
        for row, place in enumerate(places):
            if place < 0:
                continue
            x = _float(kv[row])
            latent, rope_half = x[:LATENT_DIM], x[LATENT_DIM:]
            scale = torch.rsqrt(latent.square().mean() + eps)
            into = cache[place + layer * PAGE_SIZE]
            into[:LATENT_DIM] = latent * scale * weight
            into[LATENT_DIM:] = rotate(rope_half, positions[row] - 1, rope)

    def absorb(
        self, q: Tensor, kv_b: Tensor | LayerWeights, rope: Rope | None, out: Tensor, rows: int,
        nope_dim: int,
    ) -> None:  # fmt: skip
        """See Ops.absorb. Raises ValueError for head counts and widths that no kernel has."""
        heads, kv_b = out.shape[1], self._of_layer(kv_b)
        v_dim = shapes.head_widths(kv_b, heads, nope_dim)
        w_uk = kv_b.float().view(heads, nope_dim + v_dim, LATENT_DIM)[:, :nope_dim]
        positions = self.inputs.context_len[:rows].tolist()
        for row in range(rows):
            query = _float(q[row]).view(heads, nope_dim + ROPE_DIM)
            absorbed = torch.bmm(query[:, None, :nope_dim].contiguous(), w_uk)
            out[row, :, :LATENT_DIM] = absorbed[:, 0]
            out[row, :, LATENT_DIM:] = rotate(query[:, nope_dim:], positions[row] - 1, rope)

    def append_absorb(
        self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope | None, slab: Tensor,
        layer: int, q: Tensor, kv_b: Tensor, out: Tensor, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """See Ops.append_absorb."""
        self.append(kv, norm_weight, eps, rope, slab, layer, rows)
        self.absorb(q, kv_b, rope, out, rows, nope_dim)

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
        """See Ops.attend. Raises ValueError for a slab, layer or row count that does not fit."""
        shapes.check_rows(rows)
        shapes.check_slab(slab, layer)
        last_row = first_row + rows
        starts = self.inputs.split_start[first_row : last_row + 1].tolist()
        lengths = self.inputs.context_len[first_row:last_row].tolist()
        slots = self.inputs.slot_idx[first_row:last_row].tolist()
        for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            if length == 0:
                continue
            keys = self._gather(slab, layer, slot, length)
            query = _float(q_abs[first_row + i])
            lands = q_abs.dtype == torch.bfloat16
            o, ml = self._attend_row(query, keys, length, softmax_scale, lands)
            items = slice(starts[i] - starts[0], starts[i + 1] - starts[0])
            workspace.partial_o[items] = o
            workspace.partial_ml[items] = ml

    def expand(
        self,
        workspace: AttentionWorkspace,
        kv_b: Tensor | LayerWeights,
        out: Tensor,
        first_row: int,
        rows: int,
        nope_dim: int,
    ) -> None:
        """See Ops.expand. Raises ValueError for shapes that no kernel has."""
        shapes.check_rows(rows)
        heads, kv_b = workspace.partial_o.shape[1], self._of_layer(kv_b)
        v_dim = shapes.head_widths(kv_b, heads, nope_dim)
        w_uv = kv_b.float().view(heads, nope_dim + v_dim, LATENT_DIM)[:, nope_dim:]
        starts = self.inputs.split_start[first_row : first_row + rows + 1].tolist()
        for i in range(rows):
            items = slice(starts[i] - starts[0], starts[i + 1] - starts[0])
            if items.start == items.stop:
                out[first_row + i].zero_()
                continue
            latent = self._combine(workspace.partial_o[items], workspace.partial_ml[items])
            landed = _land(latent, out.dtype == torch.bfloat16)
            out[first_row + i] = torch.bmm(landed[:, None], w_uv.mT).flatten()

    def _of_layer(self, kv_b: Tensor | LayerWeights) -> Tensor:
        """The weight of the layer that the step names, if it names one; padding names the first."""
        if isinstance(kv_b, torch.Tensor):
            return kv_b
        return kv_b.tensors[max(0, int(self.inputs.token_ids[0]))]

    def _gather(self, slab: Tensor, layer: int, slot: int, length: int) -> Tensor:
        """Rows 0 .. length - 1 of a slot's context, zeros up to the end of its last split.

        [splits, tokens, 576] float32. Nothing at or beyond `length` is read.
        """
        pages = num_pages(length)
        per_split = pages_per_split(pages)
        splits = -(-pages // per_split)
        keys = torch.zeros((splits * per_split, PAGE_SIZE, ROW_DIM))
        page_ids = self.inputs.block_table[slot, :pages].long()
        present = page_ids.clamp(min=0)  # an unmapped page is read somewhere, then zeroed
        full, tail = divmod(length, PAGE_SIZE)
        keys[:full] = slab[present[:full], layer]
        if tail:
            keys[full, :tail] = slab[int(present[full]), layer, :tail]
        keys[:pages][page_ids < 0] = 0
        return keys.view(splits, per_split * PAGE_SIZE, ROW_DIM)

    def _attend_row(
        self, query: Tensor, keys: Tensor, length: int, softmax_scale: float, lands: bool
    ) -> tuple[Tensor, Tensor]:
        """Partial outputs [splits, heads, 512] and (maximum, sum) [splits, heads, 2] of a row."""
        splits, tokens, _ = keys.shape
        dots = query @ keys.view(-1, ROW_DIM).T  # [heads, splits * tokens]
        if self.numerics == "landed":
            scale = float(_land(torch.tensor(softmax_scale), lands))
            scores = _land(_land(dots, lands) * scale, lands)
        else:
            scores = dots * softmax_scale
        scores[:, length:] = -torch.inf
        scores = scores.view(-1, splits, tokens).transpose(0, 1)  # [splits, heads, tokens]
        maximum = scores.amax(-1)
        weights = torch.exp(scores - maximum[:, :, None])
        sums = weights.sum(-1)
        if self.numerics == "landed":
            top = maximum.amax(0)
            total = (sums * torch.exp(maximum - top)).sum(0)
            weights = torch.exp(scores - top[:, None]) / total[:, None]
        o = torch.bmm(_land(weights, lands), keys[:, :, :LATENT_DIM])
        if self.numerics == "f32":
            o /= sums[:, :, None]
        return o, torch.stack((maximum, sums), dim=-1)

    def _combine(self, partial_o: Tensor, partial_ml: Tensor) -> Tensor:
        """o_lat [heads, 512] float32 of one row from its splits."""
        if self.numerics == "landed":
            return partial_o.float().sum(0)
        maximum, sums = partial_ml.unbind(-1)  # [splits, heads]
        weights = sums * torch.exp(maximum - maximum.amax(0))
        weighted = (weights[:, :, None] * partial_o.float()).sum(0)
        return weighted / weights.sum(0)[:, None]


def rotate(x: Tensor, position: int, rope: Rope | None) -> Tensor:
    """Rope halves x [..., 64] float32, turned to a position; unchanged without rope. Every value
    keeps its column, whichever the pairs are."""
    if rope is None:
        return x
    angle = position * rope.inv_freq.float()
    cosine, sine = torch.cos(angle) * rope.magnitude, torch.sin(angle) * rope.magnitude
    half = ROPE_DIM // 2
    pairs = (
        x.view(*x.shape[:-1], half, 2) if rope.interleaved else x.view(*x.shape[:-1], 2, half).mT
    )
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.flatten(-2) if rope.interleaved else turned.mT.flatten(-2)


def _float(x: Tensor) -> Tensor:
    """A float32 copy: a fresh buffer, so that the bits of a product do not follow the alignment of
    a row in its batch."""
    return x.to(torch.float32, copy=True)


def _land(x: Tensor, lands: bool) -> Tensor:
    """x rounded to bf16 (still float32) if it lands."""
    return x.to(torch.bfloat16).float() if lands else x
