from __future__ import annotations

import pytest
import torch

from latentd_kernels.reference.dense import ReferenceDense
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture
def ops() -> ReferenceDense:
    layout = RingLayout(max_rows=8, max_updates=1, max_zero_pages=1)
    return ReferenceDense(allocate_inputs(layout, 4, 4, CPU), StepRing(layout, CPU), "f32")


def relative_l2(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def test_embed_copies_rows_and_zeroes_padding(ops: ReferenceDense) -> None:
    table, out = torch.randn(10, 16).bfloat16(), torch.full((4, 16), torch.nan)
    ops.embed(table, torch.tensor([3, -1, 9], dtype=torch.int32), out, 3)
    assert torch.equal(out[0], table[3].float())
    assert torch.equal(out[1], torch.zeros(16))
    assert torch.equal(out[2], table[9].float())
    assert out[3].isnan().all()


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_norm_matches_float64(ops: ReferenceDense, act: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, out = torch.randn(5, 96), torch.randn(96).bfloat16(), torch.empty(5, 96, dtype=act)
    ops.norm(x, weight, EPS, out, 5)
    truth = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    bound = 1e-6 if act == torch.float32 else 3e-3  # one bf16 landing
    assert relative_l2(out, truth * weight.double()) < bound


def test_norm_adds_weighted_parts_and_stores_the_sum(ops: ReferenceDense) -> None:
    torch.manual_seed(2)
    x, weight, out = torch.randn(3, 32), torch.ones(32), torch.empty(3, 32)
    parts, part_weights = torch.randn(3, 4, 32), torch.rand(3, 4)
    expected = x.double() + (parts.double() * part_weights.double()[..., None]).sum(1)
    ops.norm(x, weight, EPS, out, 3, parts, part_weights)
    assert relative_l2(x, expected) < 1e-6
    truth = expected / (expected.square().mean(1, keepdim=True) + EPS).sqrt()
    assert relative_l2(out, truth) < 1e-6


def test_norm_does_not_read_parts_of_weight_zero(ops: ReferenceDense) -> None:
    x, out = torch.randn(1, 32), torch.empty(1, 32)
    before = x.clone()
    ops.norm(x, torch.ones(32), EPS, out, 1, torch.full((1, 2, 32), torch.nan), torch.zeros(1, 2))
    assert torch.equal(x, before)
    assert not out.isnan().any()


def test_linear_matches_float64_lands_and_accumulates(ops: ReferenceDense) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    exact, landed, added = torch.empty(6, 48), torch.empty(6, 48).bfloat16(), torch.ones(6, 48)
    ops.linear(x, weight, exact, 6)
    ops.linear(x, weight, landed, 6)
    ops.linear(x, weight, added, 6, accumulate=True)
    assert relative_l2(exact, x.double() @ weight.double().T) < 1e-6
    assert torch.equal(landed, exact.bfloat16())
    assert torch.equal(added, 1 + exact)


def test_a_norm_within_the_product_and_parts_beside_one_are_those_of_nodes_of_their_own(
    ops: ReferenceDense,
) -> None:
    torch.manual_seed(6)
    x, norm_weight, weight = torch.randn(1, 64), torch.randn(64).bfloat16(), torch.randn(64, 64)
    parts = torch.randn(1, 3, 64), torch.tensor([[0.5, 0.0, 2.0]])
    found, expected, normed = torch.empty(1, 64), torch.empty(1, 64), torch.empty(1, 64).bfloat16()
    late = x.clone()
    ops.norm_linear(x, norm_weight, EPS, weight, found, *parts)
    ops.linear(normed.fill_(1), weight, late, 1, True, *parts)
    ops.norm(x, norm_weight, EPS, normed, 1, *parts)  # now x has its parts
    ops.linear(normed, weight, expected, 1)
    assert torch.equal(found, expected)
    ops.linear(torch.ones(1, 64).bfloat16(), weight, x, 1, accumulate=True)
    assert torch.equal(late, x)


def test_gated_linear_matches_float64(ops: ReferenceDense) -> None:
    torch.manual_seed(4)
    weight, x, out = torch.randn(40, 64), torch.randn(6, 64), torch.empty(6, 20)
    ops.gated_linear(x, weight, out, 6)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    assert relative_l2(out, gate / (1 + (-gate).exp()) * up) < 1e-6


@pytest.mark.parametrize(("m", "k"), [(576, 256), (7, 32), (1, 64), (704, 288)])
def test_a_row_depends_on_no_other_row_and_on_no_address(
    ops: ReferenceDense, m: int, k: int
) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(m, k), torch.randn(9, k)
    batch, alone = torch.empty(9, m), torch.empty(1, m)
    ops.linear(x, weight, batch, 9)
    for row in range(9):
        for offset in range(9):  # floats: every alignment within 32 bytes
            wide = torch.empty(k + 16)
            moved = wide[offset : offset + k].view(1, k).copy_(x[row])
            ops.linear(moved, weight, alone, 1)
            assert torch.equal(alone[0], batch[row])
