"""Reference of embed, norm, linear and gated_linear: float32, one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from torch import Tensor


def float_row(x: Tensor, row: int) -> Tensor:
    """Row `row` of x as a fresh contiguous float32 vector: a matrix product's order of summation
    may follow the alignment of its operands, and the allocator always gives the same one."""
    out = torch.empty(x.shape[1], dtype=torch.float32)
    return out.copy_(x[row])


def matvec(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x in float32; bf16 weights are converted on the fly (exact, but slow)."""
    return torch.mv(weight.float(), x)


class ReferenceDense(ReferenceBase):
    """embed, norm, linear and gated_linear."""

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, rows: int) -> None:
        """out[r] = table[token_ids[r]], zero where the id is -1."""
        for row, token in enumerate(token_ids[:rows].tolist()):
            if token < 0:
                out[row].zero_()
            else:
                out[row].copy_(table[token])

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        rows: int,
        parts: Tensor | None = None,
        part_weights: Tensor | None = None,
    ) -> None:
        """RMSNorm after adding the weighted parts, if any, to x (see `Ops.norm`)."""
        scale = weight.float()
        for row in range(rows):
            value = float_row(x, row)
            if parts is not None and part_weights is not None:
                for part, part_weight in zip(parts[row], part_weights[row].tolist(), strict=True):
                    if part_weight != 0:  # padding rows have no parts
                        value.add_(part, alpha=part_weight)
                x[row].copy_(value)
            inverse = torch.rsqrt(value.square().mean() + eps)
            out[row].copy_(value * inverse * scale)

    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, accumulate: bool = False
    ) -> None:
        """out[r] = weight @ x[r], or out[r] += with `accumulate` (out float32)."""
        for row in range(rows):
            result = matvec(weight, float_row(x, row))
            if accumulate:
                out[row].add_(result)
            else:
                out[row].copy_(result)

    def gated_linear(self, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
        """out[r] = silu(gate half of weight @ x[r]) * (up half)."""
        for row in range(rows):
            gate, up = matvec(weight, float_row(x, row)).chunk(2)
            out[row].copy_(silu(gate) * up)
