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


def row_with_parts(x: Tensor, row: int, parts: Tensor, part_weights: Tensor) -> Tensor:
    """Row `row` of x, as float_row gives it, plus its weighted parts."""
    value = float_row(x, row)
    for part, part_weight in zip(parts[row], part_weights[row].tolist(), strict=True):
        if part_weight != 0:  # padding rows have no parts
            value.add_(part, alpha=part_weight)
    return value


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
            if parts is None or part_weights is None:
                value = float_row(x, row)
            else:
                value = row_with_parts(x, row, parts, part_weights)
                x[row].copy_(value)
            inverse = torch.rsqrt(value.square().mean() + eps)
            out[row].copy_(value * inverse * scale)

    def norms_in_product(self, weight: Tensor, adder: Tensor, rows: int) -> bool:
        """Never: there is no node to save."""
        return False

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out: Tensor,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """norm and linear of one row; x stays as it is."""
        normed = torch.empty(1, x.shape[1], dtype=norm_weight.dtype)
        self.norm(x[:1].clone(), norm_weight, eps, normed, 1, parts, part_weights)
        self.linear(normed, weight, out, 1)

    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, accumulate: bool = False,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out[r] = weight @ x[r], or out[r] += with `accumulate` (out float32)."""
        for row in range(rows):
            if parts is not None and part_weights is not None:
                out[row].copy_(row_with_parts(out, row, parts, part_weights))
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
