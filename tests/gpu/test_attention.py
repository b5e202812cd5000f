"""The attention kernels against float64, against the emulated landed chain, and against themselves.

Everything runs through hostile memory (see attention_case): NaN in every token that must not count.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    place_pages,
    run,
    select,
)
from latentd_kernels import attention, attention_workspace
from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.geometry import MAX_CTX, ROW_DIM
from latentd_kernels.staging import StepRing
from launching import library

if TYPE_CHECKING:
    from latentd_kernels.ops import Numerics

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]

LENGTHS = (1, 63, 64, 0, 65, 127, 128, 129, 1000, 4097, 0, 16384, 65536)
HOLES = [(7, 1), (8, 3), (9, 40), (9, 64)]
SHORT = (1, 700, 0, 64, 65, 129, 2500, 4097)
HEADS = [
    pytest.param(heads, widths, id=f"{heads} heads {widths[0]}/{widths[1]}")
    for heads, widths in (
        (1, (128, 128)),
        (16, (128, 128)),
        (20, (192, 256)),
        (32, (128, 128)),
        (64, (128, 128)),
        (96, (128, 128)),
        (128, (128, 128)),
    )
]
BOTH: list[Numerics] = ["f32", "landed"]


def launches(case: Case, numerics: Numerics) -> AttentionLaunches:
    ring = StepRing(LAYOUT, torch.device("cpu"))  # attention reads nothing of it
    stream = torch.cuda.current_stream().cuda_stream
    return AttentionLaunches(library(), case.inputs, ring, numerics, stream)


def gpu_case(
    lengths: Sequence[int],
    heads: int,
    widths: tuple[int, int] = (128, 128),
    holes: Sequence[tuple[int, int]] = (),
    spread: float = 1.0,
) -> Case:
    return make_case(lengths, heads, widths, "cuda", holes=holes, spread=spread)


@pytest.mark.parametrize("spread", [1.0, 1.5], ids=["flat", "sharper"])
@pytest.mark.parametrize(("heads", "widths"), HEADS)
def test_f32_mode_is_within_its_bounds_of_float64(
    heads: int, widths: tuple[int, int], spread: float
) -> None:
    case = gpu_case(LENGTHS, heads, widths, HOLES, spread)
    out = run(case, launches(case, "f32"), "f32")
    ulps = []
    for row, length in enumerate(LENGTHS):
        if length:
            truth = expected(case, row)
            assert oracle.relative_l2(out[row], truth) <= 6e-3, f"{length} tokens"
            ulps.append(oracle.ulps_at_rms(out[row], truth).flatten())
    errors = torch.cat(ulps)
    assert float(errors.max()) <= 12
    assert float(errors.quantile(0.99)) <= 5


@pytest.mark.parametrize(("heads", "widths"), HEADS)
def test_landed_mode_equals_its_emulation(heads: int, widths: tuple[int, int]) -> None:
    case = gpu_case(LENGTHS, heads, widths, HOLES)
    ops = launches(case, "landed")
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, "landed", q_abs)
    for row, length in enumerate(LENGTHS):
        if length:
            truth = expected_landed(case, row, q_abs)
            # Landings after a sum: the score (flips a few of many tokens), o_lat, o: one ULP each.
            assert float(oracle.ulps_at_size(out[row], truth).max()) <= 3, f"{length} tokens"


@pytest.mark.parametrize("numerics", BOTH)
def test_the_longest_context_is_within_the_bounds(numerics: Numerics) -> None:
    case = gpu_case((MAX_CTX,), 1)
    ops = launches(case, numerics)
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, numerics, q_abs)[0]
    truth = expected(case, 0) if numerics == "f32" else expected_landed(case, 0, q_abs)
    assert oracle.relative_l2(out, truth) <= 6e-3


@pytest.mark.parametrize("numerics", BOTH)
@pytest.mark.parametrize(("heads", "widths"), HEADS[1:3])
def test_empty_and_unmapped_rows_yield_exact_zeros(
    heads: int, widths: tuple[int, int], numerics: Numerics
) -> None:
    case = gpu_case((70, 0, 100), heads, widths, holes=[(2, 0), (2, 1)])
    out = run(case, launches(case, numerics), numerics)
    assert not out[1:].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("numerics", BOTH)
@pytest.mark.parametrize(("heads", "widths"), HEADS)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(
    heads: int, widths: tuple[int, int], numerics: Numerics
) -> None:
    case = gpu_case(SHORT, heads, widths)
    together = run(case, launches(case, numerics), numerics)
    for row in range(case.rows):
        alone = select(case, [row])
        assert torch.equal(run(alone, launches(alone, numerics), numerics)[0], together[row])


@pytest.mark.parametrize("numerics", BOTH)
@pytest.mark.parametrize("heads", [16, 96])
def test_a_row_has_the_same_bits_in_a_batch_of_128(heads: int, numerics: Numerics) -> None:
    case = gpu_case(SHORT, heads)
    few = run(case, launches(case, numerics), numerics)
    many = select(case, [row % len(SHORT) for row in range(128)])
    out = run(many, launches(many, numerics), numerics)
    assert torch.equal(out, few.repeat(16, 1, 1))


@pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize(("heads", "widths"), HEADS)
def test_the_portable_kernels_are_within_the_bounds(
    heads: int, widths: tuple[int, int], is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = gpu_case(SHORT, heads, widths)
    take_portable_kernels(monkeypatch)
    if not is_wide:
        monkeypatch.setattr(attention, "WIDE_SMEM", 2**20)
    out = run(case, launches(case, "f32"), "f32")
    for row, length in enumerate(SHORT):
        if length:
            assert oracle.relative_l2(out[row], expected(case, row)) <= 6e-3
            alone = select(case, [row])
            assert torch.equal(run(alone, launches(alone, "f32"), "f32")[0], out[row])


def take_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionLaunches, "plans_work", False)
    monkeypatch.setattr(AttentionLaunches, "lands_on_hopper", False)
    monkeypatch.setattr(attention_workspace, "has_hopper_kernels", lambda device: False)


@pytest.mark.parametrize("numerics", BOTH)
def test_a_smaller_grid_of_the_portable_kernels_gives_the_same_bits(
    numerics: Numerics, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_portable_kernels(monkeypatch)
    case = gpu_case(SHORT, 32)
    ops = launches(case, numerics)
    full = run(case, ops, numerics)
    form = ops._attend_form(case.rows, 32, 16)
    monkeypatch.setattr(ops, "_attend_form", lambda *_: (form[0], form[1], 7))
    assert torch.equal(run(case, ops, numerics), full)


@pytest.mark.parametrize("numerics", BOTH)
def test_rows_have_the_same_bits_in_every_call_of_a_long_step(numerics: Numerics) -> None:
    few = gpu_case(SHORT, 16)
    many = select(few, [row % len(SHORT) for row in range(300)])
    out = run(many, launches(many, numerics), numerics)
    assert torch.equal(out, run(few, launches(few, numerics), numerics).repeat(38, 1, 1)[:300])


@pytest.mark.parametrize("numerics", BOTH)
def test_physical_pages_do_not_enter_the_arithmetic(numerics: Numerics) -> None:
    case = gpu_case(SHORT, 16)
    before = run(case, launches(case, numerics), numerics)
    case.slab.fill_(torch.nan)
    place_pages(case, list(range(case.slab.shape[0])))
    assert torch.equal(run(case, launches(case, numerics), numerics), before)


def test_pages_past_every_32_bit_offset_give_the_same_bits() -> None:
    case = gpu_case((300, 129), 16)
    near = run(case, launches(case, "f32"), "f32")
    # 24 layers: int32 element offsets wrap at page 2428, uint32 ones at 4855. Never filled: only
    # the touched pages of it become real.
    slab = torch.empty(4900, 24, 64, ROW_DIM, dtype=torch.bfloat16, device="cuda")
    far = replace(case, slab=slab, layer=23)
    place_pages(far, [4899, 2428, 4861, 0, 4855, 4870, 2429, 4880])
    assert torch.equal(run(far, launches(far, "f32"), "f32"), near)


def test_context_attended_twice_has_the_same_bits() -> None:
    case = gpu_case(LENGTHS, 96)
    ops = launches(case, "f32")
    assert torch.equal(run(case, ops, "f32"), run(case, ops, "f32"))
