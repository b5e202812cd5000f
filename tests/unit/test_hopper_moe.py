"""Which kernels a MoE layer launches, by architecture, geometry and rows; over a fake library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.moe import MoeLaunches, allocate_moe_workspace
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
        assert len(products) == 2
        assert all(name.endswith("_wgmma") == hopper for name in products), rows


def test_many_rows_are_planned_and_gathered_first() -> None:
    layer = Layer("sm_90a", 16, 64, 256)
    for rows in ROWS:
        assert ("moe_plan" in layer.route(rows)) == (rows > 64)
        launched = layer.experts(rows)
        assert (launched[0].name == "moe_gather") == (rows > 64)
        plans = [launch.args[7 if "up" in launch.name else 5] for launch in launched[-2:]]
        assert all((plan is not None) == (rows > 64) for plan in plans)


def test_every_expert_that_rows_may_choose_has_its_ctas_and_the_shared_ones_come_first() -> None:
    layer = Layer("sm_90a", 16, 64, 128)
    assert [launch.grid for launch in layer.experts(1)] == [(1, 8, 1), (2, 8, 1)]
    assert [launch.grid for launch in layer.experts(2)] == [(1, 14, 1), (1, 14, 1)]
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
        assert (names == ["moe_norm_route" + "_one" * (rows == 1)]) == fused
        if not fused:
            assert (names[0], names[-1]) == ("norm_f32", "moe_route")
            assert len(names) == 3
