"""The buffers of a MoE layer, for both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd_kernels.ops import MoeWorkspace

if TYPE_CHECKING:
    from torch import Tensor


def moe_plan_ints(max_rows: int, choices: int, total_experts: int) -> int:
    """Length of `MoeWorkspace.plan`: the number of active experts (and three unused), their ids,
    where each one's entries start, and the entries row * choices + choice, grouped by expert."""
    return 4 + total_experts + (total_experts + 1) + max_rows * choices


def allocate_moe_workspace(
    max_rows: int,
    choices: int,
    total_experts: int,
    inner: int,
    hidden_size: int,
    act: torch.dtype,
    device: torch.device,
) -> MoeWorkspace:
    """Buffers of a MoE layer, shared by all layers. choices = top_k + num_shared; total_experts
    counts the shared ones too."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return MoeWorkspace(
        expert_ids=empty(torch.int32, max_rows, choices),
        expert_weights=empty(torch.float32, max_rows, choices),
        hidden=empty(act, max_rows * choices, inner),
        parts=empty(torch.float32, max_rows, choices, hidden_size),
        plan=empty(torch.int32, moe_plan_ints(max_rows, choices, total_experts)),
        progress=empty(torch.int32, 1 + total_experts),
        words=empty(torch.int64, total_experts),
    )
