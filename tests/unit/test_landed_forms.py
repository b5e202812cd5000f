"""Which forms the landed chain takes on sm_90a: every head count has one, and it fits a CTA."""

from __future__ import annotations

import re

import pytest

from latentd_kernels.attention_landed import (
    EXPAND_SMEM,
    FEW_HEADS,
    OUTPUT_SMEM,
    SUMS_SMEM,
    output_tile,
    sums_tile,
)
from latentd_kernels.manifest import SOURCES

MAX_SMEM = 232_448
"""Most shared memory of a CTA on sm_90."""


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_count_has_a_form(heads: int) -> None:
    assert sums_tile(heads) >= heads
    groups = -(-heads // output_tile(heads))
    assert groups == (1 if heads <= 64 else 2)
    assert output_tile(heads) * groups < heads + 16 * groups


@pytest.mark.parametrize(
    ("source", "entry", "sizes"),
    [
        ("landed_sums.cu", "LATENTD_LANDED_SUMS", SUMS_SMEM),
        ("landed_output.cu", "LATENTD_LANDED_OUTPUT", OUTPUT_SMEM),
    ],
)
def test_a_form_asks_for_the_shared_memory_that_its_source_states(
    source: str, entry: str, sizes: dict[int, int]
) -> None:
    code = (SOURCES / "hopper" / source).read_text(encoding="utf-8")
    stated = re.findall(rf"^{entry}\((\d+), (\d+)\)$", code, re.MULTILINE)
    assert {int(tile): int(size) for tile, size in stated} == sizes
    assert max(sizes.values()) <= MAX_SMEM


def test_queries_for_few_units_come_in_boxes_of_the_heads_that_the_source_states() -> None:
    code = (SOURCES / "hopper" / "landed.cuh").read_text(encoding="utf-8")
    stated = re.findall(r"constexpr int kFew(?:est)?Heads = (\d+);", code)
    assert tuple(map(int, stated)) == FEW_HEADS


def test_expand_asks_for_the_shared_memory_that_its_source_states() -> None:
    code = (SOURCES / "hopper" / "landed_expand.cu").read_text(encoding="utf-8")
    stated = re.findall(r"sizeof\(ExpandSmem<(\d+)>\) == (\d+)", code)
    assert {int(tile): int(size) for tile, size in stated} == EXPAND_SMEM
