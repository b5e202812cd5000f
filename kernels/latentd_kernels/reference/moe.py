"""Reference of the router and of the experts: float32, one row and one choice at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from latentd_kernels.reference.dense import ReferenceDense, float_row, matvec

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.ops import MoeWorkspace, RouterParams

NORMALIZE_EPS = 1e-20
"""Added to the sum of the chosen weights before the division (as DeepSeek's own code does)."""


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, descending; ties go to the lower index."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def choose_experts(
    logits: Tensor, bias: Tensor | None, params: RouterParams
) -> tuple[Tensor, Tensor]:
    """Ids and weights of the routed experts of one row of float32 logits [experts].

    A NaN score is never preferred. Experts outside the best groups score -inf in the choice, as
    in transformers' V3 router (its V2 router uses 0, below every softmax score).
    """
    scores = torch.softmax(logits, 0) if params.scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(choice.isnan(), -torch.inf)
    if params.num_groups > 1:
        groups = choice.view(params.num_groups, -1)
        in_group = 1 if params.group_score == "max" else 2
        group_scores = torch.sort(groups, descending=True).values[:, :in_group].sum(1)
        kept = torch.zeros(params.num_groups, dtype=torch.bool)
        kept[best(group_scores, params.top_groups)] = True
        choice = groups.masked_fill(~kept[:, None], -torch.inf).view(-1)
    ids = best(choice, params.top_k)
    weights = scores[ids]
    if params.normalize:
        weights = weights / (weights.sum() + NORMALIZE_EPS)
    return ids, weights * params.scaling


class ReferenceMoe(ReferenceDense):
    """norm_route and experts."""

    def norm_route(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """norm, linear and route, one after the other (see `Ops.norm_route`)."""
        self.norm(x, norm_weight, eps, normed, rows)
        self.linear(normed, router, logits, rows)
        self.route(logits, bias, params, workspace, rows)

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        params: RouterParams,
        workspace: MoeWorkspace,
        rows: int,
    ) -> None:
        """Fill the workspace's ids and weights from the logits (see `Ops.norm_route`)."""
        experts, top_k = logits.shape[1], params.top_k
        shared = torch.arange(experts, experts + params.num_shared, dtype=torch.int32)
        for row, slot in enumerate(self.inputs.slot_idx[:rows].tolist()):
            if slot < 0:
                workspace.expert_ids[row].fill_(-1)
                workspace.expert_weights[row].zero_()
                continue
            ids, weights = choose_experts(float_row(logits, row), bias, params)
            workspace.expert_ids[row, :top_k].copy_(ids)
            workspace.expert_weights[row, :top_k].copy_(weights)
            workspace.expert_ids[row, top_k:].copy_(shared)
            workspace.expert_weights[row, top_k:].fill_(1.0)

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """Fill the workspace's hidden values and parts (see `Ops.experts`); padding rows keep what
        was there, and their weights of 0 keep `norm` from reading it."""
        choices = workspace.expert_ids.shape[1]
        for row, chosen in enumerate(workspace.expert_ids[:rows].tolist()):
            if chosen[0] < 0:
                continue
            value = float_row(x, row)
            for c, expert in enumerate(chosen):
                gate, up = matvec(gate_up[expert], value).chunk(2)
                hidden = workspace.hidden[row * choices + c]
                hidden.copy_(silu(gate) * up)
                landed = float_row(workspace.hidden, row * choices + c)
                workspace.parts[row, c].copy_(matvec(down[expert], landed))

    def moe(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """norm_route and experts, one after the other (see `Ops.moe`)."""
        self.norm_route(x, norm_weight, eps, normed, router, bias, logits, params, workspace, rows)
        self.experts(normed, gate_up, down, params, workspace, rows)
