"""Launches of the router and of the grouped expert products: csrc/route.cu, csrc/hopper/route.cu
and what experts.py launches. Holds the limits of a MoE layer."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.dense import DenseLaunches, require_rows
from latentd_kernels.experts import (
    FEW_ROWS,
    has_wgmma,
    launch_gather,
    launch_portable,
    launch_wgmma,
)
from latentd_kernels.experts_resident import (
    Routing,
    Source,
    launch_one_row,
    launch_resident,
    one_row_stages,
    resident_stages,
)
from latentd_kernels.launcher import HOPPER

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.ops import MoeWorkspace, RouterParams

MAX_EXPERTS = 384
"""Most routed experts (csrc/route.cuh keeps one row's scores in a warp's registers)."""
MAX_TOP_K = 16
"""Most routed experts a token."""
MAX_MOE_ROWS = 512
"""Most rows of one call (csrc/route.cu lists them in shared memory)."""

_SCORING: Final = {"softmax": 0, "sigmoid": 1}  # csrc/route.cuh
_GROUP_SCORE: Final = {"max": 0, "top2": 1}
_ROUTE_WARPS: Final = 16
_ONE_CTA_ROWS: Final = 16  # up to here one CTA routes and plans
# Limits of csrc/hopper/route.cu, then the rows and the CTAs of a cluster.
_FUSED_EXPERTS: Final = 64
_FUSED_HIDDEN: Final = 2048
_FUSED_STEP: Final = 256
_CLUSTER_ROWS: Final = 8
_CLUSTER_CTAS: Final = 4


class MoeLaunches(DenseLaunches):
    """norm_route and experts, on top of what DenseLaunches has."""

    def norm_route(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """See `Ops.norm_route`; plans the expert products too, where they need it."""
        experts, hidden = router.shape
        if not self._is_fused(router):
            self.norm(x, norm_weight, eps, normed, rows)
            self.linear(normed, router, logits, rows)
            self.route(logits, bias, params, workspace, rows)
            return
        _check_route(logits, params, workspace, rows)
        require_rows("norm_route", x, "x")
        require_rows("norm_route", normed, "normed")
        ids, weights = workspace.expert_ids, workspace.expert_weights
        args: list[Argument] = [x, norm_weight, c_float(eps), normed, router, bias]
        args += [self.inputs.slot_idx, ids, weights, c_int64(x.stride(0))]
        args += [c_int64(normed.stride(0)), c_int32(rows), c_int32(hidden), c_int32(experts)]
        args += _choice_args(params)
        ctas = -(-rows // _CLUSTER_ROWS) * _CLUSTER_CTAS
        self.library.launch(
            "moe_norm_route", (ctas, 1, 1), 256, args, stream=self.stream,
            cluster=(_CLUSTER_CTAS, 1, 1),
        )  # fmt: skip
        if self._needs_plan(workspace, rows):
            self._plan(workspace, rows, experts + params.num_shared)

    def route(
        self, logits: Tensor, bias: Tensor | None, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """The choice alone, from logits that are there."""
        experts = logits.shape[1]
        _check_route(logits, params, workspace, rows)
        ids, weights = workspace.expert_ids, workspace.expert_weights
        needs_plan = self._needs_plan(workspace, rows)
        ctas = 1 if rows <= _ONE_CTA_ROWS else -(-rows // _ROUTE_WARPS)
        args: list[Argument] = [logits, bias, self.inputs.slot_idx, ids, weights]
        args += [workspace.plan if needs_plan else None, c_int32(rows), c_int32(experts)]
        args += _choice_args(params)
        threads = _ROUTE_WARPS * 32
        self.library.launch("moe_route", (ctas, 1, 1), threads, args, stream=self.stream)
        if needs_plan and ctas > 1:
            self._plan(workspace, rows, experts + params.num_shared)

    def _has_wgmma(self, workspace: MoeWorkspace) -> bool:
        inner, hidden = workspace.hidden.shape[1], workspace.parts.shape[2]
        return has_wgmma(self.library.arch, inner, hidden)

    def _is_fused(self, router: Tensor) -> bool:
        experts, hidden = router.shape
        fits = (
            2 <= experts <= _FUSED_EXPERTS and hidden <= _FUSED_HIDDEN and hidden % _FUSED_STEP == 0
        )
        return self.library.arch == HOPPER and fits

    def _needs_plan(self, workspace: MoeWorkspace, rows: int) -> bool:
        return rows > FEW_ROWS or not self._has_wgmma(workspace)

    def _plan(self, workspace: MoeWorkspace, rows: int, total: int) -> None:
        entries = rows * workspace.expert_ids.shape[1]
        args: list[Argument] = [workspace.expert_ids, workspace.plan]
        args += [c_int32(entries), c_int32(total)]
        self.library.launch("moe_plan", (1, 1, 1), _ROUTE_WARPS * 32, args, stream=self.stream)

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """See `Ops.experts`; reads the choice and the plan that norm_route left."""
        self._experts(x, gate_up, down, params, workspace, rows, None)

    def moe(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """See `Ops.moe`; experts of few rows start on the shared ones beside the router."""
        is_fused = self._is_fused(router)
        stages = one_row_stages(self, down.shape[2], down.shape[1])
        if rows == 1 and is_fused and stages and self._has_wgmma(workspace):
            _check_route(logits, params, workspace, rows)
            routing = Routing(x, norm_weight, eps, router, bias, self.inputs.slot_idx)
            launch_one_row(self, routing, gate_up, down, _choice_args(params), workspace, stages)
            return
        self.norm_route(x, norm_weight, eps, normed, router, bias, logits, params, workspace, rows)
        source = Source(x, norm_weight, eps) if is_fused else None
        self._experts(normed, gate_up, down, params, workspace, rows, source)

    def _experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int, source: Source | None,
    ) -> None:  # fmt: skip
        require_rows("experts", x, "x")
        if not self._has_wgmma(workspace):
            launch_portable(self, x, gate_up, down, workspace, rows)
            return
        stages = resident_stages(self, down.shape[2], down.shape[1], rows)
        if stages:
            launch_resident(self, x, gate_up, down, params, workspace, rows, stages, source)
            return
        if rows > FEW_ROWS:
            launch_gather(self, x, down.shape[0], params, workspace, rows)
        launch_wgmma(self, x, gate_up, down, params, workspace, rows)


def _choice_args(params: RouterParams) -> list[Argument]:
    numbers = (
        params.top_k,
        _SCORING[params.scoring],
        params.num_groups,
        params.top_groups,
        _GROUP_SCORE[params.group_score],
        int(params.normalize),
        params.num_shared,
    )
    return [*map(c_int32, numbers), c_float(params.scaling)]


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
