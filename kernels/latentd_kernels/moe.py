"""Launches of the router and of the grouped expert products; csrc/{route,moe}.cu compute them."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels.dense import require_k, require_rows, tiled_smem
from latentd_kernels.launcher import Launcher
from latentd_kernels.ops import MoeWorkspace

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.ops import RouterParams

MAX_EXPERTS = 384
"""Most routed experts (csrc/route.cu keeps one row's scores in a warp's registers)."""
MAX_TOP_K = 16
"""Most routed experts a token."""
MAX_MOE_ROWS = 512
"""Most rows of one call (csrc/route.cu lists them in shared memory)."""


_SCORING: Final = {"softmax": 0, "sigmoid": 1}  # csrc/route.cu
_GROUP_SCORE: Final = {"max": 0, "top2": 1}
_ROUTE_WARPS: Final = 16
_ONE_CTA_ROWS: Final = 16  # up to here one CTA routes and plans
_THREADS: Final = 256
_TILED_FEATURES: Final = 128
_SKINNY_ENTRIES: Final = 24  # mean entries an expert from which the tiled product pays


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
    )


class MoeLaunches(Launcher):
    """route and experts."""

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        params: RouterParams,
        workspace: MoeWorkspace,
        rows: int,
    ) -> None:
        """See `Ops.route`; plans the expert products too."""
        experts, choices = logits.shape[1], params.top_k + params.num_shared
        _check_route(logits, params, workspace, rows)
        ids, weights, plan = workspace.expert_ids, workspace.expert_weights, workspace.plan
        numbers = (
            rows,
            experts,
            params.top_k,
            _SCORING[params.scoring],
            params.num_groups,
            params.top_groups,
            _GROUP_SCORE[params.group_score],
            int(params.normalize),
            params.num_shared,
        )
        args: list[Argument] = [
            logits,
            bias,
            self.inputs.slot_idx,
            ids,
            weights,
            plan,
            *map(c_int32, numbers),
        ]
        args.append(c_float(params.scaling))
        ctas = 1 if rows <= _ONE_CTA_ROWS else -(-rows // _ROUTE_WARPS)
        threads = _ROUTE_WARPS * 32
        self.library.launch(
            "moe_route",
            (ctas, 1, 1),
            threads,
            args,
            stream=self.stream,
        )
        if ctas > 1:
            plan_args: list[Argument] = [
                ids,
                plan,
                c_int32(rows * choices),
                c_int32(experts + params.num_shared),
            ]
            self.library.launch("moe_plan", (1, 1, 1), threads, plan_args, stream=self.stream)

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, workspace: MoeWorkspace, rows: int
    ) -> None:
        """See `Ops.experts`; reads the plan that `route` left in the workspace."""
        total, hidden_size, inner = down.shape
        choices = workspace.expert_ids.shape[1]
        require_rows("experts", x, "x")
        require_k("experts", gate_up.shape[2])
        require_k("experts", inner)
        active = min(total, rows * choices)
        # Few rows an expert: straight from memory. Many (prompt chunks): through shared memory.
        tiled = rows * choices > _SKINNY_ENTRIES * total
        suffix, smem = ("_tiled", tiled_smem(_TILED_FEATURES)) if tiled else ("", 0)
        height = _TILED_FEATURES if tiled else 16
        k_up = gate_up.shape[2]
        up: list[Argument] = [x, gate_up, workspace.hidden, workspace.plan]
        up += [*map(c_int32, (total, choices, inner, k_up)), c_int64(x.stride(0))]
        down_args: list[Argument] = [workspace.hidden, down, workspace.parts, workspace.plan]
        down_args += map(c_int32, (total, inner, hidden_size))
        for name, features, args in (
            ("moe_gate_up", 2 * inner, up),
            ("moe_down", hidden_size, down_args),
        ):
            grid = (-(-features // height), active, 1)
            self.library.launch(name + suffix, grid, _THREADS, args, stream=self.stream, smem=smem)


def _check_route(logits: Tensor, params: RouterParams, workspace: MoeWorkspace, rows: int) -> None:
    experts, choices = logits.shape[1], params.top_k + params.num_shared
    sizes = (
        ("experts", experts, MAX_EXPERTS),
        ("top_k", params.top_k, min(MAX_TOP_K, experts)),
        ("choices a row", choices, 32),
        ("groups", params.num_groups, 32),
        ("rows", rows, MAX_MOE_ROWS),
        ("choices", rows * choices, MAX_MOE_ROWS * (MAX_TOP_K + 1)),
    )
    for name, value, limit in sizes:
        if value > limit:
            raise ValueError(f"route: {value} {name}, at most {limit} are supported")
    if workspace.expert_ids.shape[1] != choices or logits.stride(0) != experts:
        raise ValueError(
            f"route: needs contiguous logits and {choices} choices a row in the workspace, "
            f"not strides {logits.stride()} and {workspace.expert_ids.shape[1]}"
        )
    if experts % params.num_groups:
        raise ValueError(f"route: {experts} experts do not divide into {params.num_groups} groups")
