"""The landed chain's two passes on sm_90a: the same scores in both, and no batch in the bits.

What both architectures' kernels must do (the emulation, empty rows, unmapped pages, rows alone) is
in test_attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import oracle
from attention_case import (
    LAYOUT,
    Case,
    absorb,
    attend_and_expand,
    expected_landed,
    make_case,
    place_pages,
    run,
)
from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.geometry import ROW_DIM, num_pages
from latentd_kernels.staging import StepRing
from launching import library

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]

HEADS = (1, 5, 16, 20, 33, 48, 64, 80, 96, 128)
LENGTHS = (1, 64, 65, 0, 1025, 4097, 300, 17000)


def launches(case: Case) -> AttentionLaunches:
    ring = StepRing(LAYOUT, torch.device("cpu"))  # attention reads nothing of it
    stream = torch.cuda.current_stream().cuda_stream
    return AttentionLaunches(library(), case.inputs, ring, "landed", stream)


def repeated(case: Case, tokens: torch.Tensor) -> None:
    """Every row's context becomes its one token [576], again and again."""
    for row, token in enumerate(tokens):
        case.contents[row] = token.expand(len(case.contents[row]), ROW_DIM).contiguous()
    pages = sum(num_pages(len(content)) for content in case.contents)
    place_pages(case, list(range(pages)))


def near_orthogonal(query: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens [count, 576] whose products with the query [576] are large and cancel: the f32 order
    of the sum decides what the dot lands on."""
    tokens = torch.randn(count, ROW_DIM, device=query.device) * 30
    direction = query.float() / query.float().norm()
    along: torch.Tensor = (tokens @ direction)[:, None] * direction
    return (tokens - along).bfloat16()


@pytest.mark.parametrize("heads", HEADS)
def test_equal_tokens_have_exactly_equal_shares_so_both_passes_score_alike(heads: int) -> None:
    lengths = (1, 2, 8, 64, 128, 1024) * 16
    case = make_case(lengths, heads, device="cuda")
    query = (torch.randn(ROW_DIM, device="cuda") * 30).bfloat16()
    tokens = near_orthogonal(query, 16).repeat_interleave(6, dim=0)
    repeated(case, tokens)
    q_abs = query.expand(len(lengths), heads, ROW_DIM).contiguous()
    out = attend_and_expand(case, launches(case), "landed", q_abs).view(16, 6, heads, -1)
    # 1 / n is exact and so are the sums: each length gives W_UV times the token itself.
    assert torch.equal(out, out[:, :1].expand_as(out))
    w_uv = case.kv_b.view(heads, -1, 512)[:, case.nope_dim :].double()
    truth = torch.einsum("hvc,rc->rhv", w_uv, tokens[::6, :512].double())
    torch.testing.assert_close(out[:, 0].double(), truth, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
def test_every_head_count_equals_the_emulation(heads: int, spread: float) -> None:
    case = make_case(LENGTHS, heads, device="cuda", spread=spread)
    ops = launches(case)
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, "landed", q_abs)
    for row, length in enumerate(LENGTHS):
        if length:
            truth = expected_landed(case, row, q_abs)
            # A sum in another order may land next door: one ULP of o_lat and of o. A score that
            # does so moves its token's share by up to e^ULP, which all columns of its head see.
            ulps = oracle.ulps_at_size(out[row], truth)
            by_head = ulps.amax(dim=-1)
            assert oracle.relative_l2(out[row], truth) <= 4e-3, f"{length} tokens"
            assert int((by_head > 3).sum()) <= max(1, heads // 20), f"{length} tokens"


@pytest.mark.parametrize("heads", [16, 48, 64, 80, 128])
@pytest.mark.parametrize(
    ("lengths", "ctas"), [(LENGTHS, 2), (LENGTHS, 7), (LENGTHS, 131), ((1025,), 7)]
)
def test_the_number_of_ctas_does_not_enter_the_arithmetic(
    lengths: Sequence[int], heads: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(lengths, heads, device="cuda")
    full = run(case, launches(case), "landed")  # a row alone: CTAs of few heads in both passes
    monkeypatch.setattr(library(), "sm_count", ctas)
    assert torch.equal(run(case, launches(case), "landed"), full)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 5), (64,) * 128, (1,) * 128])
def test_rows_of_few_pages_fill_and_starve_the_grid_alike(lengths: Sequence[int]) -> None:
    case = make_case(lengths, 16, device="cuda")
    ops = launches(case)
    q_abs = absorb(case, ops)
    out = attend_and_expand(case, ops, "landed", q_abs)
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any()
        elif row % 16 == 1:
            truth = expected_landed(case, row, q_abs)
            assert oracle.relative_l2(out[row], truth) <= 4e-3
