from __future__ import annotations

import pytest
import torch

from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.moe_workspace import allocate_moe_workspace
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
    "v3-few": (16, RouterParams(8, "sigmoid", 8, 4, "top2", True, 2.5, 1)),
    "glm": (64, RouterParams(4, "sigmoid", 1, 1, "top2", True, 1.8, 1)),
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
        self.space.hidden.fill_(torch.nan)
        ops.route(self.logits[first:], None, self.params, self.space, rows)
        ops.experts(self.x[first:], self.gate_up, self.down, self.params, self.space, rows)
        assert not self.space.progress.any()
        return self.space.parts[:rows].clone()

    def truth(self, row: int) -> torch.Tensor:
        parts = []
        for expert in self.space.expert_ids[row].tolist():
            gate, up = (self.gate_up[expert].double() @ self.x[row].double()).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).bfloat16().double()
            parts.append(self.down[expert].double() @ hidden)
        return torch.stack(parts)


SIZES = {  # inner, hidden; "wide" is one that only the portable kernels take
    "v2-lite": (1408, 2048),
    "glm": (1536, 2048),
    "v3-few": (2048, 7168),
    "demo": (128, 256),
    "wide": (96, 64),
}


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


def test_every_number_of_rows_gives_a_row_the_same_bits() -> None:
    torch.manual_seed(7)
    ops = make_ops()
    layer = Layer(*ROUTERS["v2-lite"], 128, 256)
    alone = torch.cat([layer.run(ops, row, 1) for row in range(129)])
    for count in range(1, 130):
        first = 129 - count
        assert torch.equal(layer.run(ops, first, count), alone[first:]), count


@pytest.mark.parametrize("size", [(128, 256), (96, 128)], ids=["wgmma", "portable"])
def test_rows_that_all_choose_one_expert_share_it_in_turns(size: tuple[int, int]) -> None:
    torch.manual_seed(4)
    ops = make_ops()
    experts, params = ROUTERS["v2-lite"]
    layer = Layer(experts, params, *size)
    layer.logits[:] = torch.arange(experts, device=CUDA).float().neg()
    alone = layer.run(ops, 30, 1)
    for rows in (31, 64, 65, 100, 512):
        parts = layer.run(ops, 0, rows)
        assert torch.equal(parts[30:31], alone)
        assert not parts.isnan().any()


@pytest.mark.parametrize("rows", [16, 64, 100, 512])
def test_padding_rows_choose_nothing_and_touch_no_other_row(rows: int) -> None:
    torch.manual_seed(5)
    ops = make_ops()
    layer = Layer(*ROUTERS["demo"], 128, 256)
    whole = layer.run(ops, 0, rows)
    is_padding = torch.arange(512, device=CUDA) % 3 == 1
    layer.x[is_padding] = torch.nan
    ops.inputs.slot_idx[is_padding] = -1
    padded = layer.run(ops, 0, rows)
    assert torch.equal(padded[~is_padding[:rows]], whole[~is_padding[:rows]])
    if rows <= 64:  # more rows are laid out in the memory of the parts first
        assert padded[is_padding[:rows]].isnan().all()
    ops.inputs.slot_idx[:] = -1
    assert layer.run(ops, 0, rows).isnan().all()


@pytest.mark.parametrize("rows", [2, 100])
def test_replay_equals_eager(rows: int) -> None:
    torch.manual_seed(6)
    ops = make_ops()
    layer = Layer(*ROUTERS["v2-lite"], 96, 128)
    eager = layer.run(ops, 0, rows)
    layer.space.parts.fill_(torch.nan)

    def step() -> None:
        ops.route(layer.logits, None, layer.params, layer.space, rows)
        ops.experts(layer.x, layer.gate_up, layer.down, layer.params, layer.space, rows)

    replay(step, times=2)
    assert torch.equal(layer.space.parts[:rows], eager)


class Routed:
    """A residual stream and a router, and what norm_route makes of them."""

    def __init__(self, experts: int, params: RouterParams, hidden: int) -> None:
        self.params, self.experts = params, experts
        self.x = randn(512, hidden, dtype=torch.float32, scale=3.0)
        self.norm, self.router = randn(hidden), randn(experts, hidden, scale=hidden**-0.5)
        self.bias = randn(experts, dtype=torch.float32, scale=0.1)
        self.space = workspace(experts, params)
        self.normed = poisoned(512, hidden)

    def run(self, ops: CudaOps, first: int, rows: int) -> tuple[torch.Tensor, ...]:
        self.normed.fill_(torch.nan)
        self.space.expert_ids.fill_(-77)
        logits = poisoned(512, self.experts, dtype=torch.float32)
        ops.norm_route(
            self.x[first:], self.norm, 1e-6, self.normed, self.router, self.bias, logits,
            self.params, self.space, rows,
        )  # fmt: skip
        made = (self.normed, self.space.expert_ids, self.space.expert_weights)
        return tuple(tensor[:rows].clone() for tensor in made)


@pytest.mark.parametrize(
    ("router", "hidden"),
    [("v2-lite", 2048), ("glm", 2048), ("demo", 256), ("wide", 1536), ("wide", 64), ("v3", 7168)],
)
def test_norm_route_chooses_by_the_logits_of_the_normed_rows(router: str, hidden: int) -> None:
    torch.manual_seed(8)
    ops = make_ops()
    layer = Routed(*ROUTERS[router], hidden)
    plain = poisoned(100, hidden)
    ops.norm(layer.x, layer.norm, 1e-6, plain, 100)
    normed, ids, weights = layer.run(ops, 0, 100)
    assert torch.equal(normed, plain)
    logits = normed.double() @ layer.router.double().T
    top_k = layer.params.top_k
    for row in range(100):
        expected = choose_experts(logits[row].cpu(), layer.bias.double().cpu(), layer.params)
        # Two experts of equal score, but for rounding, may change places.
        torch.testing.assert_close(weights[row, :top_k].double().cpu(), expected[1],
                                   rtol=2e-5, atol=1e-7)  # fmt: skip
        assert (
            sum(a != b for a, b in zip(ids[row].tolist(), expected[0].tolist(), strict=False)) < 3
        )


@pytest.mark.parametrize(("router", "hidden"), [("v2-lite", 2048), ("demo", 256)])
def test_norm_route_gives_a_row_the_same_bits_in_any_batch(router: str, hidden: int) -> None:
    torch.manual_seed(9)
    ops = make_ops()
    layer = Routed(*ROUTERS[router], hidden)
    rows = [layer.run(ops, row, 1) for row in range(129)]
    alone = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    for count in range(1, 130):
        for value, expected in zip(layer.run(ops, 129 - count, count), alone, strict=True):
            assert torch.equal(value, expected[-count:]), count
    for value, expected in zip(layer.run(ops, 0, 512), alone, strict=True):
        assert torch.equal(value[:129], expected)


@pytest.mark.parametrize(
    ("router", "inner", "hidden"),
    [("v2-lite", 1408, 2048), ("glm", 1536, 2048), ("demo", 128, 256), ("v3", 64, 512)],
)
@pytest.mark.parametrize(
    ("rows", "ctas"), [(1, 132), (1, 7), (2, 132), (3, 132), (8, 132), (9, 132)]
)
def test_experts_beside_the_router_have_the_bits_of_those_behind_it(
    router: str, inner: int, hidden: int, rows: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(10)
    ops = make_ops()
    layer, many = Routed(*ROUTERS[router], hidden), 32
    layer.space = workspace(layer.experts, layer.params, 512, inner, hidden)
    total = layer.experts + layer.params.num_shared
    gate_up = randn(total, 2 * inner, hidden, scale=hidden**-0.5)
    down = randn(total, hidden, inner, scale=inner**-0.5)
    normed, ids, weights = layer.run(ops, 0, many)
    ops.experts(normed, gate_up, down, layer.params, layer.space, many)
    expected = layer.space.parts[:many].clone()
    assert not expected.isnan().any()
    logits = poisoned(512, layer.experts, dtype=torch.float32)
    monkeypatch.setattr(ops.library, "sm_count", ctas)

    def step(first: int) -> None:
        ops.moe(
            layer.x[first:], layer.norm, 1e-6, layer.normed, layer.router, layer.bias, logits,
            gate_up, down, layer.params, layer.space, rows,
        )  # fmt: skip

    for first in (0, 5, many - rows):
        layer.space.parts.fill_(torch.nan)
        layer.space.hidden.fill_(torch.nan)
        layer.space.expert_ids.fill_(-77)
        step(first)
        assert torch.equal(layer.space.parts[:rows], expected[first : first + rows]), first
        assert torch.equal(layer.space.expert_ids[:rows], ids[first : first + rows]), first
        assert torch.equal(layer.space.expert_weights[:rows], weights[first : first + rows]), first
        assert not layer.space.progress.any()
        assert not layer.space.words.any()
    replay(lambda: step(0), times=3)
    assert torch.equal(layer.space.parts[:rows], expected[:rows])


def test_a_single_padding_row_chooses_nothing_and_leaves_its_parts() -> None:
    torch.manual_seed(11)
    ops = make_ops()
    layer = Routed(*ROUTERS["v2-lite"], 2048)
    layer.space = workspace(layer.experts, layer.params, 1, 128, 2048)
    total = layer.experts + layer.params.num_shared
    gate_up, down = randn(total, 256, 2048), randn(total, 2048, 128)
    for slot in (-1, 0):
        ops.inputs.slot_idx[0] = slot
        ops.moe(
            layer.x, layer.norm, 1e-6, layer.normed, layer.router, layer.bias,
            poisoned(1, layer.experts, dtype=torch.float32), gate_up, down, layer.params,
            layer.space, 1,
        )  # fmt: skip
        assert (layer.space.expert_ids >= 0).all() == (slot == 0)
        assert layer.space.parts.isnan().all() == (slot < 0)
        if slot < 0:
            assert (layer.space.expert_ids == -1).all()
            assert (layer.space.expert_weights == 0).all()
        assert not layer.space.progress.any()
        assert not layer.space.words.any()


def test_norm_route_lets_padding_rows_choose_nothing() -> None:
    ops = make_ops()
    layer = Routed(*ROUTERS["v2-lite"], 2048)
    ops.inputs.slot_idx[1::2] = -1
    _, ids, weights = layer.run(ops, 0, 21)
    assert (ids[1::2] == -1).all()
    assert (weights[1::2] == 0).all()
    assert (ids[::2] >= 0).all()


def test_limits_are_refused_by_name() -> None:
    ops = make_ops()
    experts, params = ROUTERS["v2-lite"]
    space = workspace(experts, params, rows=8)
    with pytest.raises(ValueError, match="513 rows"):
        ops.route(poisoned(1, 64, dtype=torch.float32), None, params, space, 513)
    with pytest.raises(ValueError, match="400 experts"):
        ops.route(poisoned(1, 400, dtype=torch.float32), None, params, space, 1)
