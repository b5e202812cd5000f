"""The forms of the sm_90a attention kernels: what may follow the rows, and that they fit an SM."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from attention_case import LAYOUT, make_case
from latentd_kernels.attention_hopper import WIDE_SMEM, HopperAttention, attend_smem
from latentd_kernels.attention_maps import AttendCall
from latentd_kernels.attention_shapes import HEAD_WIDTHS, MAX_CALL_ROWS
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.expand_forms import expand_form
from latentd_kernels.head_tiles import ANY_HEADS, ANY_TILES, WIDE_HEADS, WIDE_TILE, head_tile
from latentd_kernels.staging import StepRing

MAX_SMEM = 232_448  # of a CTA of compute capability 9.0
ROWS = range(1, MAX_CALL_ROWS + 1)


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_form_of_attend_fits_into_an_sm(heads: int) -> None:
    tiles = {head_tile(heads, splits, 1 + splits // 4, splits, 132) for splits in range(1, 200)}
    if heads >= WIDE_HEADS:
        assert tiles == {2 * WIDE_TILE}
        assert WIDE_SMEM <= MAX_SMEM
    elif heads >= ANY_HEADS:
        assert tiles <= set(ANY_TILES)
        assert attend_smem(ANY_TILES[-1]) <= MAX_SMEM
    else:
        assert len(tiles) == 1
        assert attend_smem(*tiles) <= MAX_SMEM


def test_few_splits_are_dealt_in_tiles_of_few_heads() -> None:
    def tile(heads: int, splits: int) -> int:
        return head_tile(heads, splits, splits // 8, 2 * splits, 132)

    assert {splits: tile(96, splits) for splits in (1, 44, 45, 999)} == {
        1: 32,
        44: 32,
        45: 48,
        999: 48,
    }
    assert tile(64, 1) == tile(64, 999) == 32


def test_short_chains_are_dealt_in_narrow_tiles_where_that_makes_enough() -> None:
    for rows, tile in ((7, 48), (8, 32), (11, 32), (12, 48), (16, 48)):
        assert head_tile(96, 16 * rows, 4 * rows, 16 * rows, 132) == tile
    assert head_tile(96, 128, 32, 512, 132) == 48


@pytest.mark.parametrize(("_", "v_dim"), HEAD_WIDTHS)
@pytest.mark.parametrize("heads", [1, 16, 20, 63, 64, 96, 128])
def test_every_form_of_expand_fits_into_an_sm(heads: int, _: int, v_dim: int) -> None:
    for rows in ROWS:
        form = expand_form(rows, heads, v_dim)
        assert form.smem <= MAX_SMEM
        assert v_dim % (form.values * form.cluster) == 0
        assert 0 < form.cta_rows <= form.max_rows


def test_a_call_that_starts_between_the_planned_ones_is_refused() -> None:
    case = make_case((5,), 4)
    nothing = cast(Any, None)
    ops = HopperAttention(nothing, case.inputs, StepRing(LAYOUT, torch.device("cpu")), "f32", 0)
    workspace = allocate_workspace(1, 64, 4, "f32", torch.device("cpu"))
    q_abs = torch.zeros(8, 4, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="first_row 3: expected a multiple of 128"):
        ops.hopper_attend(AttendCall(q_abs, case.slab, 1, workspace, 3, 1, 0.1))
