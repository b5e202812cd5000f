"""How attention is dealt to CTAs: everything once, in order, within the workspace."""

from __future__ import annotations

import random

import pytest

from latentd_kernels.geometry import MAX_CTX, MAX_SPLITS, PAGE_SIZE, num_pages, work_pages_per_split
from latentd_kernels.row_tiles import row_tile
from latentd_kernels.work_plan import CallPlan, chain_splits, max_nodes

HEADS = [1, 16, 17, 32, 33, 64, 96, 128]


def random_lengths(rows: int, most: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([0, rng.randint(1, most), rng.randint(1, 65)]) for _ in range(rows)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 3, 16, 128])
def test_every_split_of_every_head_group_is_dealt_once_and_in_order(heads: int, rows: int) -> None:
    for seed, most in enumerate((64, 3000, 65_536)):
        lengths = random_lengths(rows, most, seed)
        plan = CallPlan(lengths, range(rows), heads, rows, 132)
        dealt = []
        for cta in range(132):
            share = plan.work(cta)
            assert share.num_splits == 0 or share.head_tile == plan.head_tile
            group, row, split = share.head_group, share.row, share.first_split
            for _ in range(share.num_splits):
                while split == plan.row(row).num_splits:
                    split, row = 0, row + 1
                    if row == rows:
                        group, row = group + 1, 0
                dealt.append((group, row, split))
                split += 1
        groups = -(-heads // plan.head_tile)
        assert dealt == [
            (group, row, split)
            for group in range(groups)
            for row in range(rows)
            for split in range(plan.row(row).num_splits)
        ]


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 24])
@pytest.mark.parametrize(("last", "rows"), [(128, 128), (700, 100), (4200, 128), (9, 9), (65, 8)])
def test_every_row_of_a_chunk_is_in_one_tile_of_equally_many_pages(
    heads: int, last: int, rows: int
) -> None:
    lengths = list(range(last - rows + 1, last + 1))
    plan = CallPlan(lengths, [0] * rows, heads, rows, 132, chunk=True)
    seen: list[int] = []
    for row in range(rows):
        tile = range(row, row + plan.row(row).tile_rows)
        assert len(tile) <= row_tile(heads, rows)
        assert len({num_pages(lengths[r]) for r in tile}) <= 1
        seen += tile
    assert seen == list(range(rows))
    alone = CallPlan(lengths, [0] * rows, heads, rows, 132)
    for row in range(rows):
        assert plan.row(row)._replace(tile_rows=1) == alone.row(row)


@pytest.mark.parametrize("heads", [1, 16, 24])
def test_every_split_of_a_tile_is_dealt_once_and_in_order(heads: int) -> None:
    lengths = list(range(1000, 1128))
    plan = CallPlan(lengths, [0] * 128, heads, 512, 132, chunk=True)
    dealt = []
    for cta in range(132):
        share = plan.work(cta)
        row, split = share.row, share.first_split
        for _ in range(share.num_splits):
            if split == plan.row(row).num_splits:
                row, split = row + plan.row(row).tile_rows, 0
            dealt.append((row, split))
            split += 1
    assert dealt == [
        (row, split)
        for row in range(128)
        if plan.row(row).tile_rows
        for split in range(plan.row(row).num_splits)
    ]


@pytest.mark.parametrize("heads", HEADS)
def test_a_cta_starts_with_whole_nodes(heads: int) -> None:
    plan = CallPlan(random_lengths(128, 8192, 1), range(128), heads, 128, 132)
    for cta in range(132):
        share = plan.work(cta)
        if share.num_splits:
            most = chain_splits(share.plan.pages_per_split, heads)
            assert share.plan.splits_per_node == most
            assert share.first_split % most == 0


@pytest.mark.parametrize("heads", HEADS)
def test_the_nodes_of_a_call_fit_the_workspace(heads: int) -> None:
    for max_ctx in (1, 64, 1000, 1025, 4160, 16_385, 65_536, MAX_CTX):
        for rows in (1, 2, 7, 128):
            room = max_nodes(rows, max_ctx, heads)
            for length in {
                max_ctx,
                *(pages * 64 for pages in (1, 16, 64, 65, 128, 129, 256, 257, 1024)),
            }:
                plan = CallPlan([min(length, max_ctx)] * rows, [0] * rows, heads, rows, 132)
                assert plan.nodes[-1] <= room


def test_rows_of_up_to_128_pages_are_cut_finer_where_one_cta_serves_all_heads() -> None:
    lengths = (16, 17, 64, 65, 128, 129)
    assert [work_pages_per_split(pages, 48) for pages in lengths] == [1, 2, 2, 2, 2, 4]
    assert [work_pages_per_split(pages, 49) for pages in lengths] == [1, 2, 2, 4, 4, 4]


def test_a_row_has_at_most_256_splits() -> None:
    for heads in HEADS:
        for pages in (*range(1, 1100), num_pages(MAX_CTX)):
            assert -(-pages // work_pages_per_split(pages, heads)) <= MAX_SPLITS


def test_pages_are_old_up_to_the_first_token_that_the_step_can_have_appended() -> None:
    lengths = [640, 641, 705, 63, 1]
    one = [CallPlan(lengths, range(5), 16, 1, 132).row(row).old_pages for row in range(5)]
    assert one == [9, 10, 11, 0, 0]
    many = [CallPlan(lengths, range(5), 16, 5, 132).row(row).old_pages for row in range(5)]
    assert many == [(640 - 5) // PAGE_SIZE, (641 - 5) // PAGE_SIZE, (705 - 5) // PAGE_SIZE, 0, 0]
