from __future__ import annotations

import math

import pytest
import torch

from latentd_kernels.moe_workspace import allocate_moe_workspace, moe_plan_ints
from latentd_kernels.ops import MoeWorkspace, RouterParams
from latentd_kernels.reference.moe import ReferenceMoe, choose_experts
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

CPU = torch.device("cpu")
PLAIN = RouterParams(2, "softmax", 1, 1, "max", False, 1.0, 0)


def make_ops(live: int) -> ReferenceMoe:
    layout = RingLayout(max_rows=8, max_updates=1, max_zero_pages=1)
    inputs = allocate_inputs(layout, 8, 4, CPU)
    inputs.slot_idx[:live] = torch.arange(live)
    return ReferenceMoe(inputs, StepRing(layout, CPU), "f32")


def by_hand(
    logits: list[float], bias: list[float] | None, params: RouterParams
) -> tuple[list[int], list[float]]:
    """The router as its paper states it, in Python floats."""
    if params.scoring == "softmax":
        exponentials = [math.exp(value) for value in logits]
        scores = [value / sum(exponentials) for value in exponentials]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = len(logits) // params.num_groups
    if params.num_groups > 1:
        best = 1 if params.group_score == "max" else 2
        group_scores = [
            sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:best])
            for g in range(params.num_groups)
        ]
        order = sorted(range(params.num_groups), key=lambda g: (-group_scores[g], g))
        allowed = set(order[: params.top_groups])
        choice = [c if i // size in allowed else -math.inf for i, c in enumerate(choice)]
    ids = sorted(range(len(logits)), key=lambda i: (-choice[i], i))[: params.top_k]
    weights = [scores[i] for i in ids]
    if params.normalize:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return ids, [weight * params.scaling for weight in weights]


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        RouterParams(6, "softmax", 8, 3, "max", False, 16.0, 0),
        RouterParams(8, "sigmoid", 8, 4, "top2", True, 2.5, 0),
        RouterParams(4, "sigmoid", 1, 1, "top2", True, 1.8, 0),
    ],
    ids=["plain", "v2", "v3", "glm"],
)
def test_the_choice_is_the_one_made_by_hand(params: RouterParams, with_bias: bool) -> None:
    torch.manual_seed(1)
    for _ in range(20):
        logits = torch.randn(32)
        bias = torch.randn(32) * 0.3 if with_bias else None
        ids, weights = choose_experts(logits, bias, params)
        expected = by_hand(logits.tolist(), None if bias is None else bias.tolist(), params)
        assert ids.tolist() == expected[0]
        assert weights.tolist() == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
def test_the_choice_is_the_one_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    common = {"hidden_size": 32, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    if model == "deepseek_v2":
        module = transformers.models.deepseek_v2.modeling_deepseek_v2
        config = transformers.DeepseekV2Config(
            **common, n_routed_experts=16, topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
        )  # fmt: skip
        gate = module.DeepseekV2TopkRouter(config)
        params = RouterParams(4, "softmax", 4, 2, "max", False, 16.0, 0)
        bias = None
    else:
        module = transformers.models.deepseek_v3.modeling_deepseek_v3
        config = transformers.DeepseekV3Config(
            **common, n_routed_experts=16, norm_topk_prob=True, routed_scaling_factor=2.5
        )
        gate = module.DeepseekV3TopkRouter(config)
        params = RouterParams(4, "sigmoid", 4, 2, "top2", True, 2.5, 0)
        bias = torch.randn(16) * 0.5
        gate.e_score_correction_bias.copy_(bias)
    torch.nn.init.normal_(gate.weight)
    with torch.no_grad():
        logits, weights, ids = gate(torch.randn(50, 32))
    for row in range(50):
        ours, our_weights = choose_experts(logits[row], bias, params)
        theirs = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert set(ours.tolist()) == set(theirs)
        assert our_weights.tolist() == pytest.approx([theirs[i] for i in ours.tolist()], rel=1e-5)


def test_ties_go_to_the_lower_id_in_groups_and_in_experts() -> None:
    params = RouterParams(3, "sigmoid", 4, 2, "top2", False, 1.0, 0)
    assert choose_experts(torch.zeros(8), None, params)[0].tolist() == [0, 1, 2]


def test_bias_enters_the_choice_and_not_the_weight() -> None:
    params = RouterParams(1, "sigmoid", 1, 1, "max", False, 1.0, 0)
    ids, weights = choose_experts(torch.tensor([2.0, -1.0]), torch.tensor([0.0, 5.0]), params)
    assert ids.tolist() == [1]
    assert weights.tolist() == pytest.approx([1 / (1 + math.e)])


def test_a_nan_score_is_not_preferred() -> None:
    params = RouterParams(1, "sigmoid", 1, 1, "max", False, 1.0, 0)
    assert choose_experts(torch.tensor([torch.nan, -9.0]), None, params)[0].tolist() == [1]


def workspace(params: RouterParams, experts: int) -> MoeWorkspace:
    made = allocate_moe_workspace(
        8, params.top_k + params.num_shared, experts + params.num_shared, 32, 64, torch.float32, CPU
    )
    made.parts.fill_(torch.nan)
    return made


def test_shared_experts_follow_with_weight_one_and_padding_chooses_none() -> None:
    params = RouterParams(2, "softmax", 1, 1, "max", True, 1.0, 2)
    ops, space = make_ops(live=1), workspace(params, 4)
    ops.route(torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 2), None, params, space, 2)
    assert space.expert_ids[0].tolist() == [1, 3, 4, 5]
    assert space.expert_weights[0, 2:].tolist() == [1.0, 1.0]
    assert float(space.expert_weights[0, :2].sum()) == pytest.approx(1.0)
    assert space.expert_ids[1].tolist() == [-1] * 4
    assert space.expert_weights[1].tolist() == [0.0] * 4


def test_experts_match_float64_and_leave_padding_rows_alone() -> None:
    torch.manual_seed(3)
    params = RouterParams(2, "softmax", 1, 1, "max", False, 1.0, 1)
    ops, space = make_ops(live=3), workspace(params, 4)
    gate_up, down, x = torch.randn(5, 64, 64), torch.randn(5, 64, 32), torch.randn(4, 64)
    ops.route(torch.randn(4, 4), None, params, space, 4)
    ops.experts(x, gate_up, down, params, space, 4)
    for row in range(3):
        for c, expert in enumerate(space.expert_ids[row].tolist()):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            truth = down[expert].double() @ (gate / (1 + (-gate).exp()) * up)
            torch.testing.assert_close(
                space.parts[row, c].double(), truth, rtol=1e-5, atol=1e-5 * float(truth.norm())
            )
    assert space.parts[3].isnan().all()


def test_the_plan_holds_every_entry() -> None:
    assert moe_plan_ints(max_rows=3, choices=2, total_experts=5) == 4 + 5 + 6 + 6
