"""Which kernels a MoE layer launches, by architecture, geometry and rows; over a fake library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.moe import MoeLaunches
from latentd_kernels.moe_workspace import allocate_moe_workspace
from latentd_kernels.ops import RouterParams
from recording import Recorder

ROUTER = RouterParams(6, "softmax", 1, 1, "max", False, 1.0, 2)
ROWS = (1, 2, 8, 64, 65, 128, 512)


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "tensor_map", lambda *args, **rest: driver.TensorMap())


class Layer:
    """A MoE layer of zeros and what it launches."""

    def __init__(self, arch: str, experts: int, inner: int, hidden: int) -> None:
        self.library = Recorder(arch)
        inputs: Any = SimpleNamespace(slot_idx=torch.zeros(512, dtype=torch.int32))
        nothing: Any = None
        self.ops = MoeLaunches(self.library, inputs, nothing, "f32", 0)  # type: ignore[arg-type]
        total, act = experts + ROUTER.num_shared, torch.bfloat16
        self.space = allocate_moe_workspace(
            512, ROUTER.top_k + ROUTER.num_shared, total, inner, hidden, act, torch.device("cpu")
        )
        self.residual, self.x = torch.zeros(512, hidden), torch.zeros(512, hidden, dtype=act)
        self.norm, self.router = self.x[0], torch.zeros(experts, hidden, dtype=act)
        self.logits = torch.zeros(512, experts)
        self.gate_up = torch.zeros(total, 2 * inner, hidden, dtype=act)
        self.down = torch.zeros(total, hidden, inner, dtype=act)

    def route(self, rows: int) -> list[str]:
        self.ops.norm_route(
            self.residual, self.norm, 1e-6, self.x, self.router, None, self.logits, ROUTER,
            self.space, rows,
        )  # fmt: skip
        return self.library.names()

    def moe(self, rows: int) -> None:
        self.library.launches.clear()
        self.ops.moe(
            self.residual, self.norm, 1e-6, self.x, self.router, None, self.logits, self.gate_up,
            self.down, ROUTER, self.space, rows,
        )  # fmt: skip

    def experts(self, rows: int) -> list[SimpleNamespace]:
        self.library.launches.clear()
        self.ops.experts(self.x, self.gate_up, self.down, ROUTER, self.space, rows)
        return list(self.library.launches)


@pytest.mark.parametrize(
    ("arch", "inner", "hidden", "hopper"),
    [
        ("sm_90a", 64, 128, True),
        ("sm_90a", 96, 128, False),
        ("sm_90a", 64, 96, False),
        ("sm_80", 64, 128, False),
        ("sm_100", 64, 128, False),
    ],
)
def test_architecture_and_geometry_alone_decide_which_kernels_run_experts(
    arch: str, inner: int, hidden: int, hopper: bool
) -> None:
    layer = Layer(arch, 16, inner, hidden)
    for rows in ROWS:
        names = [launch.name for launch in layer.experts(rows)]
        products = [name for name in names if name != "moe_gather"]
        if hopper and rows <= 8:
            assert products == ["moe_experts_few"]
            continue
        assert len(products) == 2
        assert all(name.endswith("_wgmma") == hopper for name in products), rows


@pytest.mark.parametrize(
    ("inner", "hidden", "rows", "one"),
    [
        (1408, 2048, 8, True),
        (1408, 2048, 9, False),
        (64, 64, 1, False),  # no whole tile of 128 features
        (2048, 7168, 1, False),  # activations that leave no room for weights
    ],
)
def test_few_rows_take_one_launch_of_a_cta_an_sm_where_it_fits(
    inner: int, hidden: int, rows: int, one: bool
) -> None:
    layer = Layer("sm_90a", 1, inner, hidden)
    launched = layer.experts(rows)
    assert ([launch.name for launch in launched] == ["moe_experts_few"]) == one
    if one:
        assert launched[0].grid == (132, 1, 1)
        assert launched[0].smem + 5120 <= layer.library.max_smem


@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "beside"),
    [
        (2, 16, 256, True),
        (3, 16, 256, False),  # so many are normed sooner by the router's node
        (1, 65, 256, False),  # a router of several nodes
        (2, 65, 256, False),
        (1, 16, 128, False),
    ],
)
def test_experts_of_few_rows_need_not_wait_for_the_router_to_norm_them(
    rows: int, experts: int, hidden: int, beside: bool
) -> None:
    layer = Layer("sm_90a", experts, 64, hidden)
    layer.moe(rows)
    launched = layer.library.launches[-1]
    assert launched.name == "moe_experts_few"
    assert (launched.args[9] is layer.residual) == beside
    assert (launched.args[9] is None) != beside


@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "inner", "one"),
    [
        (1, 16, 256, 64, True),
        (1, 64, 2048, 1408, True),
        (2, 64, 2048, 1408, False),
        (1, 65, 2048, 1408, False),  # more logits than a warp takes
        (1, 16, 128, 64, False),
        (1, 16, 256, 96, False),  # no whole tile of 64 features
    ],
)
def test_a_single_row_is_normed_routed_and_multiplied_in_one_launch(
    rows: int, experts: int, hidden: int, inner: int, one: bool
) -> None:
    layer = Layer("sm_90a", experts, inner, hidden)
    layer.moe(rows)
    launched = layer.library.launches[-1]
    assert (layer.library.names() == ["moe_experts_one"]) == one
    if one:
        assert launched.grid == (132, 1, 1)
        assert launched.smem + 5120 <= layer.library.max_smem


def test_many_rows_are_planned_and_gathered_first() -> None:
    layer = Layer("sm_90a", 16, 64, 256)
    for rows in ROWS:
        assert ("moe_plan" in layer.route(rows)) == (rows > 64)
        launched = layer.experts(rows)
        assert (launched[0].name == "moe_gather") == (rows > 64)
        if rows <= 8:
            continue
        plans = [launch.args[7 if "up" in launch.name else 5] for launch in launched[-2:]]
        assert all((plan is not None) == (rows > 64) for plan in plans)


def test_every_expert_that_rows_may_choose_has_its_ctas_and_the_shared_ones_come_first() -> None:
    layer = Layer("sm_90a", 16, 64, 128)
    assert [launch.grid for launch in layer.experts(9)] == [(1, 18, 1), (1, 18, 1)]
    assert [launch.grid for launch in layer.experts(64)] == [(1, 18, 1), (1, 18, 1)]


@pytest.mark.parametrize(
    ("arch", "experts", "hidden", "fused"),
    [
        ("sm_90a", 64, 2048, True),
        ("sm_90a", 8, 256, True),
        ("sm_90a", 65, 2048, False),
        ("sm_90a", 64, 2304, False),
        ("sm_90a", 64, 128, False),
        ("sm_80", 64, 2048, False),
    ],
)
def test_a_small_router_is_one_node_with_its_norm_for_every_number_of_rows(
    arch: str, experts: int, hidden: int, fused: bool
) -> None:
    layer = Layer(arch, experts, 64, hidden)
    for rows in ROWS:
        names = [name for name in layer.route(rows) if name != "moe_plan"]
        assert (names == ["moe_norm_route"]) == fused
        if not fused:
            assert (names[0], names[-1]) == ("norm_f32", "moe_route")
            assert len(names) == 3
