"""Which kernel multiplies by which matrix: bits by the matrix alone, and kernels that exist."""

from __future__ import annotations

import re

import pytest

from latentd_kernels.linear_plan import (
    BLOCK_K,
    OTHERS,
    WHOLE_ROWS,
    LinearKernel,
    choose,
    num_segments,
    parse,
    whole,
)
from latentd_kernels.linear_rows import MANY_ROWS, RowsKernel
from latentd_kernels.linear_strips import STRIPS, StripKernel
from latentd_kernels.linear_table import MEASURED, ROWS
from latentd_kernels.manifest import SOURCES

MATRICES = [
    *MEASURED,
    (8, 64, False),
    (64, 256, False),
    (102, 704, False),
    (3000, 2048, False),
    (200_000, 2048, False),
    (7168, 2048, False),
    (40, 64, True),
    (2816, 512, True),
]
MAX_SMEM = 227 * 1024  # of a CTA of sm_90
MAX_CLUSTER = 8
ROW_COUNTS = (*range(1, 130), 256, 257, 511, 512, 2048)


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_the_segments_of_k_do_not_depend_on_the_rows(matrix: tuple[int, int, bool]) -> None:
    weight_rows, k, gated = matrix
    found = [choose(weight_rows, k, rows, gated) for rows in ROW_COUNTS]
    segments = {kernel.segments * kernel.ctas for kernel in found}
    assert segments == {1 if gated else num_segments(weight_rows, k)}
    assert segments <= {1, 2, 4, 8}
    assert min(segments) * BLOCK_K <= k


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_kernels_fit_an_sm_and_cover_the_matrix(matrix: tuple[int, int, bool]) -> None:
    weight_rows, k, gated = matrix
    for rows in ROW_COUNTS:
        kernel = choose(weight_rows, k, rows, gated)
        assert kernel.smem <= MAX_SMEM
        assert kernel.ctas <= MAX_CLUSTER
        for num_sms in (1, 114, 132):
            if isinstance(kernel, StripKernel):
                assert rows <= kernel.rows
                assert kernel.grid(weight_rows, rows, num_sms) == (1, 1, min(num_sms, weight_rows))
                continue
            if isinstance(kernel, RowsKernel):
                assert kernel.grid(weight_rows, rows) == (
                    -(-rows // 256),
                    -(-weight_rows // 112),
                    1,
                )
                continue
            x, y, z = kernel.grid(weight_rows, rows, num_sms, gated)
            row_tiles, shares = (x, y) if kernel.turns else (y, z)
            assert row_tiles * kernel.rows >= rows
            if kernel.turns:
                assert shares <= -(-weight_rows // 16)  # what weights are dealt out in
                continue
            assert x == kernel.ctas
            height = kernel.height(weight_rows, rows, num_sms, gated)
            assert height % 4 == 0
            assert 0 < height <= (32 if gated else 64)
            features, tile = weight_rows // (2 if gated else 1), height * kernel.groups
            assert (shares - 1) * tile < features <= shares * tile


def test_lower_panels_fill_whole_rounds_of_the_card() -> None:
    kernel = parse("128.2.6.6e", 2)  # one CTA an SM, two a tile
    assert kernel.height(7168, 128, 132, False) == 56
    assert kernel.grid(7168, 128, 132) == (2, 1, 64)
    assert kernel._replace(even=False).height(7168, 128, 132, False) == 64
    assert kernel._replace(even=False).grid(7168, 128, 132) == (2, 1, 56)
    assert kernel.grid(64, 128, 132) == (2, 1, 8)  # panels of four features
    gated = parse("128.5.4.4e", 1)
    assert gated.height(36864, 128, 132, True) == 28
    assert gated.grid(36864, 128, 132, True) == (1, 1, 132)


def test_every_kernel_of_the_table_is_compiled_and_no_other() -> None:
    source = (SOURCES / "hopper/linear.cu").read_text()
    found = set()
    instance = r"^LATENTD_(LINEAR|GATED)(_TURNS|_TEAMS|_LATE)?(_RUNS)?\(([\d, ]+)\)$"
    for form, turns, runs, sizes in re.findall(instance, source, re.MULTILINE):
        n, g, w, x, s = (*sizes.split(", "), "1", "1")[:5]
        kind = "".join(f"{word[1:].lower()}_" for word in (turns, runs) if word)
        one_tile = turns in ("", "_LATE")
        variant = f"{kind}n{n}_g{g}_w{w}" + (f"_x{x}_s{s}" if one_tile else "")
        found.add(f"{form.lower()}_{variant}")
    wanted = {
        ("gated_" if gated else "linear_") + parse(name, segments).variant
        for (_, _, gated), (segments, names) in MEASURED.items()
        for name in names.split()
        if name not in OTHERS
    }
    assert found == wanted


def test_strips_are_for_large_matrices_of_few_rows() -> None:
    for matrix in ((129280, 7168), (163840, 7168)):
        assert [choose(*matrix, rows, False) is STRIPS for rows in (1, 8, 9)] == [1, 1, 0]
    assert choose(36864, 7168, 8, True) is STRIPS
    assert choose(7168, 18432, 1, False) is not STRIPS  # two segments of K
    source = (SOURCES / "hopper/linear_strips.cuh").read_text()
    sizes = "kRows = (\\d+), kWarps = (\\d+), kCopiers = (\\d+), kStages = (\\d+);"
    found = re.search(sizes, source)
    assert found is not None
    rows, warps, copiers, stages = map(int, found.groups())
    assert rows == STRIPS.rows
    assert STRIPS.threads == 32 * (warps + copiers)
    assert STRIPS.smem == 2048 + stages * (16 * warps + rows) * 1024


def test_many_rows_of_7168_features_fill_the_card_in_one_round() -> None:
    for k in (8192, 16384, 18432):
        assert [choose(7168, k, rows, False) is MANY_ROWS for rows in (384, 385, 512)] == [0, 1, 1]
    x, y, z = MANY_ROWS.grid(7168, 512)
    assert 112 < x * y * z <= 132  # of 128 features there would be 112 tiles
    source = (SOURCES / "hopper/linear_rows.cu").read_text()
    found = re.search(r"LinearRows<(\d+), (\d+), (\d+)>", source)
    assert found is not None
    features, stages_w, stages_x = map(int, found.groups())
    assert features == MANY_ROWS.features
    rings = 128 * (stages_w * features + stages_x * 256)
    assert MANY_ROWS.smem == 2048 + rings + 256 * features // 2 * 4  # of half of the sums


def test_every_measured_matrix_has_a_kernel_for_each_number_of_rows() -> None:
    for _, names in MEASURED.values():
        assert len(names.split()) == len(ROWS)


def test_a_matrix_that_was_not_measured_takes_the_kernels_of_one_like_it() -> None:
    assert num_segments(3700, 2048) == num_segments(3648, 2048)
    assert choose(3700, 2048, 8, False) == choose(3648, 2048, 8, False)


def test_a_gated_matrix_whose_features_are_no_multiple_of_eight_takes_no_turns() -> None:
    def takes_turns(weight_rows: int, rows: int) -> bool:
        kernel = choose(weight_rows, 2048, rows, True)
        return isinstance(kernel, LinearKernel) and bool(kernel.turns)

    assert takes_turns(21888, 512)
    assert not any(takes_turns(21892, rows) for rows in ROW_COUNTS)


def test_weight_rows_that_are_no_multiple_of_eight_are_not_copied_by_eights() -> None:
    def takes_runs(weight_rows: int, k: int) -> bool:
        kernels = (choose(weight_rows, k, rows, False) for rows in ROW_COUNTS)
        return any(isinstance(kernel, LinearKernel) and kernel.blocks > 1 for kernel in kernels)

    assert takes_runs(2048, 10944)
    assert takes_runs(163840, 7168)
    assert not takes_runs(2044, 10944)
    assert not takes_runs(163836, 7168)


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_ctas_that_hold_their_weights_cut_k_as_all_kernels_of_the_matrix_do(
    matrix: tuple[int, int, bool],
) -> None:
    weight_rows, k, _ = matrix
    kernel = whole(weight_rows, k)
    if kernel is None:
        return
    assert kernel.ctas == num_segments(weight_rows, k)
    assert kernel.ctas * kernel.blocks * BLOCK_K == k
    assert weight_rows % 64 == 0
    assert kernel.smem <= MAX_SMEM


def test_such_kernels_are_compiled_for_the_small_matrices_of_few_rows() -> None:
    assert [whole(m, 2048) is not None for m in (2048, 3648, 3700, 576)] == [1, 1, 0, 0]
    assert whole(2048, 1984) is None
    source = (SOURCES / "hopper/linear_whole.cu").read_text()
    for m in (2048, 3648):
        kernel = whole(m, 2048)
        assert kernel is not None
        for form in ("WHOLE", "NORM_LINEAR"):
            assert f"LATENTD_{form}({kernel.blocks}, {kernel.ctas}" in source
    assert f"kWholeRows = {WHOLE_ROWS};" in (SOURCES / "hopper/linear_whole.cuh").read_text()
