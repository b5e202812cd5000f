from __future__ import annotations

import pytest
import torch

from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.moe import allocate_moe_workspace
from latentd_kernels.ops import MoeWorkspace, RouterParams
from latentd_kernels.reference.moe import choose_experts
from launching import CUDA, make_ops, poisoned, randn, relative_l2, replay

pytestmark = pytest.mark.gpu

ROUTERS = {  # experts, parameters
    "v2-lite": (64, RouterParams(6, "softmax", 1, 1, "max", False, 1.0, 2)),
    "v2": (160, RouterParams(6, "softmax", 8, 3, "max", False, 16.0, 2)),
    "v3": (256, RouterParams(8, "sigmoid", 8, 4, "top2", True, 2.5, 1)),
    "kimi": (384, RouterParams(8, "sigmoid", 1, 1, "top2", True, 2.827, 1)),
    "demo": (8, RouterParams(2, "sigmoid", 1, 1, "top2", True, 1.0, 1)),
    "wide": (40, RouterParams(16, "softmax", 4, 2, "top2", True, 1.0, 0)),
}


def workspace(
    experts: int, params: RouterParams, rows: int = 512, inner: int = 64, hidden: int = 256
) -> MoeWorkspace:
    made = allocate_moe_workspace(
        rows, params.top_k + params.num_shared, experts + params.num_shared, inner, hidden,
        torch.bfloat16, CUDA,
    )  # fmt: skip
    made.expert_ids.fill_(-77)
    made.expert_weights.fill_(torch.nan)
    made.hidden.fill_(torch.nan)
    made.parts.fill_(torch.nan)
    return made


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("router", ROUTERS)
def test_route_chooses_what_the_reference_chooses(router: str, rows: int) -> None:
    torch.manual_seed(1)
    ops = make_ops()
    experts, params = ROUTERS[router]
    logits = randn(rows, experts, dtype=torch.float32)
    bias = randn(experts, dtype=torch.float32, scale=0.1) if params.scoring == "sigmoid" else None
    space = workspace(experts, params)
    ops.inputs.slot_idx[0] = -1 if rows > 1 else 0
    ops.route(logits, bias, params, space, rows)
    ids, weights = space.expert_ids.cpu(), space.expert_weights.cpu()
    for row in range(1 if rows > 1 else 0, rows):
        chosen, expected = choose_experts(
            logits[row].cpu(), None if bias is None else bias.cpu(), params
        )
        shared = list(range(experts, experts + params.num_shared))
        assert ids[row].tolist() == chosen.tolist() + shared
        torch.testing.assert_close(weights[row, : params.top_k], expected, rtol=2e-6, atol=1e-9)
        assert weights[row, params.top_k :].tolist() == [1.0] * params.num_shared
    if rows > 1:
        assert ids[0].tolist() == [-1] * ids.shape[1]
        assert weights[0].tolist() == [0.0] * ids.shape[1]
    assert (ids[rows:] == -77).all()


@pytest.mark.parametrize("router", ROUTERS)
def test_ties_go_to_the_lower_expert(router: str) -> None:
    ops = make_ops()
    experts, params = ROUTERS[router]
    space = workspace(experts, params)
    ops.route(torch.zeros(3, experts, device=CUDA), None, params, space, 3)
    assert space.expert_ids[:3, : params.top_k].tolist() == [list(range(params.top_k))] * 3


def test_a_nan_score_is_not_preferred() -> None:
    ops = make_ops()
    experts, params = ROUTERS["demo"]
    space = workspace(experts, params)
    logits = torch.tensor([[torch.nan, 0, 1, torch.nan, 2, 0, 0, 0]], device=CUDA)
    ops.route(logits, None, params, space, 1)
    assert space.expert_ids[0, :2].tolist() == [4, 2]


class Layer:
    """Random experts with NaN in every expert that no row may choose."""

    def __init__(self, experts: int, params: RouterParams, inner: int, hidden: int) -> None:
        self.params, self.usable = params, experts * 3 // 4
        total = experts + params.num_shared
        self.gate_up = randn(total, 2 * inner, hidden, scale=hidden**-0.5)
        self.down = randn(total, hidden, inner, scale=inner**-0.5)
        self.gate_up[self.usable : experts] = torch.nan
        self.down[self.usable : experts] = torch.nan
        self.x = randn(512, hidden)
        self.logits = randn(512, experts, dtype=torch.float32)
        self.logits[:, self.usable :] = -100.0
        self.space = workspace(experts, params, 512, inner, hidden)

    def run(self, ops: CudaOps, first: int, rows: int) -> torch.Tensor:
        self.space.parts.fill_(torch.nan)
        ops.route(self.logits[first:], None, self.params, self.space, rows)
        ops.experts(self.x[first:], self.gate_up, self.down, self.space, rows)
        return self.space.parts[:rows].clone()

    def truth(self, row: int) -> torch.Tensor:
        parts = []
        for expert in self.space.expert_ids[row].tolist():
            gate, up = (self.gate_up[expert].double() @ self.x[row].double()).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).bfloat16().double()
            parts.append(self.down[expert].double() @ hidden)
        return torch.stack(parts)


SIZES = {"v2-lite": (1408, 2048), "demo": (128, 256), "wide": (96, 64)}


@pytest.mark.parametrize("router", SIZES)
def test_experts_match_float64_and_read_only_chosen_weights(router: str) -> None:
    torch.manual_seed(2)
    ops = make_ops()
    layer = Layer(*ROUTERS[router], *SIZES[router])
    for rows in (1, 8, 50, 512):
        parts = layer.run(ops, 0, rows)
        for row in {0, rows // 2, rows - 1}:
            # A hidden value near a rounding boundary of bf16 may land on the other side.
            assert relative_l2(parts[row], layer.truth(row)) < 1e-3, (rows, row)
        assert not parts.isnan().any()


@pytest.mark.parametrize("router", SIZES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(router: str) -> None:
    torch.manual_seed(3)
    ops = make_ops()
    layer = Layer(*ROUTERS[router], *SIZES[router])
    rows = 160
    alone = torch.cat([layer.run(ops, row, 1) for row in range(rows)])
    assert not alone.isnan().any()
    for count in (2, 8, 9, 33, 64, 65, 128):
        assert torch.equal(layer.run(ops, rows - count, count), alone[-count:]), count
    assert torch.equal(layer.run(ops, 0, 512)[:rows], alone)


def test_rows_that_all_choose_one_expert_share_it_in_turns() -> None:
    torch.manual_seed(4)
    ops = make_ops()
    experts, params = ROUTERS["v2-lite"]
    layer = Layer(experts, params, 96, 128)
    layer.logits[:] = torch.arange(experts, device=CUDA).float().neg()
    alone = layer.run(ops, 99, 1)
    for rows in (100, 512):
        parts = layer.run(ops, 0, rows)
        assert torch.equal(parts[99:100], alone)
        assert not parts.isnan().any()


def test_padding_rows_choose_nothing_and_write_nothing() -> None:
    torch.manual_seed(5)
    ops = make_ops()
    layer = Layer(*ROUTERS["demo"], 128, 256)
    whole = layer.run(ops, 0, 16)
    ops.inputs.slot_idx[4:16] = -1
    padded = layer.run(ops, 0, 16)
    assert torch.equal(padded[:4], whole[:4])
    assert padded[4:].isnan().all()
    ops.inputs.slot_idx[:16] = -1
    assert layer.run(ops, 0, 16).isnan().all()


@pytest.mark.parametrize("rows", [2, 100])
def test_replay_equals_eager(rows: int) -> None:
    torch.manual_seed(6)
    ops = make_ops()
    layer = Layer(*ROUTERS["v2-lite"], 96, 128)
    eager = layer.run(ops, 0, rows)
    layer.space.parts.fill_(torch.nan)

    def step() -> None:
        ops.route(layer.logits, None, layer.params, layer.space, rows)
        ops.experts(layer.x, layer.gate_up, layer.down, layer.space, rows)

    replay(step, times=2)
    assert torch.equal(layer.space.parts[:rows], eager)


def test_limits_are_refused_by_name() -> None:
    ops = make_ops()
    experts, params = ROUTERS["v2-lite"]
    space = workspace(experts, params, rows=8)
    with pytest.raises(ValueError, match="513 rows"):
        ops.route(poisoned(1, 64, dtype=torch.float32), None, params, space, 513)
    with pytest.raises(ValueError, match="400 experts"):
        ops.route(poisoned(1, 400, dtype=torch.float32), None, params, space, 1)
