"""The torch reference of the attention kernels against the float64 oracle, and its promises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import oracle
from attention_case import (
    LAYOUT,
    Case,
    absorb,
    attend_and_expand,
    expected,
    expected_landed,
    make_case,
    make_rope,
    place_pages,
    run,
    select,
)
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM
from latentd_kernels.reference.attention import ReferenceAttention
from latentd_kernels.staging import StepRing

if TYPE_CHECKING:
    from latentd_kernels.ops import Numerics

LENGTHS = (1, 63, 0, 64, 65, 129, 1100, 4200)
WIDTHS = [
    pytest.param(4, (128, 128), id="4 heads 128/128"),
    pytest.param(3, (192, 256), id="3 heads 192/256"),
]
BOTH: list[Numerics] = ["f32", "landed"]


def reference(case: Case, numerics: Numerics) -> ReferenceAttention:
    return ReferenceAttention(case.inputs, StepRing(LAYOUT, torch.device("cpu")), numerics)


@pytest.mark.parametrize(("heads", "widths"), WIDTHS)
# Scores of standard deviation 1.2 and 1.8; more would mostly measure the landing of q_abs.
@pytest.mark.parametrize("spread", [1.0, 1.5], ids=["flat", "sharper"])
def test_f32_mode_is_within_its_bounds_of_float64(
    heads: int, widths: tuple[int, int], spread: float
) -> None:
    case = make_case(LENGTHS, heads, widths, spread=spread)
    out = run(case, reference(case, "f32"), "f32")
    for row, length in enumerate(LENGTHS):
        if length:
            truth = expected(case, row)
            assert oracle.relative_l2(out[row], truth) <= 6e-3
            assert oracle.ulps_at_rms(out[row], truth).max() <= 12


@pytest.mark.parametrize("numerics", BOTH)
def test_float32_activations_land_nowhere(numerics: Numerics) -> None:
    case = make_case(LENGTHS, 4, act=torch.float32)
    out = run(case, reference(case, numerics), numerics)
    for row, length in enumerate(LENGTHS):
        if length:
            assert oracle.relative_l2(out[row], expected(case, row)) <= 3e-6


@pytest.mark.parametrize(("heads", "widths"), WIDTHS)
def test_landed_mode_equals_its_emulation(heads: int, widths: tuple[int, int]) -> None:
    case = make_case(LENGTHS, heads, widths)
    ops = reference(case, "landed")
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, "landed", q_abs)
    for row, length in enumerate(LENGTHS):
        if length:
            truth = expected_landed(case, row, q_abs)
            # Two landings (o_lat, o) may each fall on the other side of a tie: one ULP apiece.
            assert oracle.ulps_at_rms(out[row], truth).max() <= 2


@pytest.mark.parametrize("numerics", BOTH)
def test_an_unmapped_page_counts_as_zero_latents(numerics: Numerics) -> None:
    case = make_case((200, 130, 40), 4, holes=[(0, 1), (1, 0), (1, 2), (2, 0)])
    ops = reference(case, numerics)
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, numerics, q_abs)
    for row in range(2):
        truth = expected(case, row) if numerics == "f32" else expected_landed(case, row, q_abs)
        assert oracle.relative_l2(out[row], truth) <= 6e-3
    assert not out[2].any()


@pytest.mark.parametrize("numerics", BOTH)
def test_an_empty_row_yields_zeros(numerics: Numerics) -> None:
    case = make_case((70, 0, 3), 4)
    out = run(case, reference(case, numerics), numerics)
    assert not out[1].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("numerics", BOTH)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(numerics: Numerics) -> None:
    case = make_case(LENGTHS, 4)
    together = run(case, reference(case, numerics), numerics)
    for row in range(case.rows):
        alone = select(case, [row])
        assert torch.equal(run(alone, reference(alone, numerics), numerics)[0], together[row])


@pytest.mark.parametrize("numerics", BOTH)
def test_rows_have_the_same_bits_in_every_call_of_a_long_step(numerics: Numerics) -> None:
    few = make_case((1, 64, 70), 2)
    many = select(few, [row % 3 for row in range(130)])
    out = run(many, reference(many, numerics), numerics)
    assert torch.equal(out, run(few, reference(few, numerics), numerics).repeat(44, 1, 1)[:130])


@pytest.mark.parametrize("numerics", BOTH)
def test_physical_pages_do_not_enter_the_arithmetic(numerics: Numerics) -> None:
    case = make_case((300, 500), 4)
    before = run(case, reference(case, numerics), numerics)
    case.slab.fill_(torch.nan)
    place_pages(case, list(range(case.slab.shape[0])))
    assert torch.equal(run(case, reference(case, numerics), numerics), before)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_append_norms_and_rotates_into_the_layer_slice(interleaved: bool) -> None:
    case = make_case((5, 64), 1)
    rope = make_rope(torch.device("cpu"), interleaved, magnitude=1.3)
    kv = torch.randn(2, ROW_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = (1 + torch.arange(512) / 512).bfloat16()
    slab = torch.zeros(3, 2, PAGE_SIZE, ROW_DIM, dtype=torch.bfloat16)
    case.inputs.kv_row[:2] = torch.tensor([2 * 2 * PAGE_SIZE + 7, -1])
    reference(case, "f32").append(kv, weight, 1e-6, rope, slab, 1, 2)

    latent = kv[0, :512].double()
    normed = latent / (latent.square().mean() + 1e-6).sqrt() * weight.double()
    pairs = "neighbours" if interleaved else "halves"
    turned = oracle.rotated(kv[0, 512:], 4, rope.inv_freq, 1.3, pairs)
    truth = torch.cat((normed, turned))
    torch.testing.assert_close(slab[2, 1, 7].double(), truth, rtol=2**-8, atol=1e-6)
    slab[2, 1, 7] = 0
    assert not slab.any()  # nothing else was written, and -1 was skipped


def test_a_model_without_rope_keeps_the_rope_half() -> None:
    case = make_case((5,), 2)
    ops = reference(case, "f32")
    q_abs = absorb(replace(case, rope=make_rope(torch.device("cpu"), magnitude=1.0)), ops)
    plain = torch.empty_like(q_abs)
    ops.absorb(case.q, case.kv_b, None, plain, 1, 128)
    assert torch.equal(plain[0, :, 512:], case.q.view(2, 192)[:, 128:])
    assert torch.equal(plain[..., :512], q_abs[..., :512])
