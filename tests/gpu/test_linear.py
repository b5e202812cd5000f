from __future__ import annotations

from functools import partial

import pytest
import torch

from latentd_kernels.linear_plan import BLOCK_K, OTHERS, WHOLE_ROWS, choose, parse, whole
from latentd_kernels.linear_rows import MANY_ROWS
from latentd_kernels.linear_strips import STRIPS
from latentd_kernels.linear_table import MEASURED
from launching import make_ops, poisoned, randn, relative_l2, replay

pytestmark = pytest.mark.gpu

SHAPES = [
    (2048, 10944),
    (102400, 2048),
    (2048, 2048),
    (3648, 2048),
    (576, 2048),
    (3072, 1536),
    (64, 2048),
    (384, 7168),
    (102, 704),
    (8, 256),
    (256, 64),
    (100, 96),
    (704, 32),
]
BATCHES = (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 100, 127, 128, 129, 256, 257, 511)


def name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_linear_matches_float64(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    ops = make_ops()
    m, k = shape
    weight, x = randn(m, k, scale=k**-0.5), randn(128, k)
    truth = x.double() @ weight.double().T
    for rows in (1, 5, 16, 32, 128):
        landed, exact = poisoned(rows, m), poisoned(rows, m, dtype=torch.float32)
        ops.linear(x, weight, landed, rows)
        ops.linear(x, weight, exact, rows)
        # f32 sums of at most 10944 terms; Hopper's warpgroup products cut what they add, 2.9e-6
        assert relative_l2(exact, truth[:rows]) < 5e-6
        assert torch.equal(landed, exact.bfloat16())


@pytest.mark.parametrize("inner", [10944, 1408, 256, 20], ids=str)
def test_gated_linear_matches_float64(inner: int) -> None:
    torch.manual_seed(2)
    ops = make_ops()
    weight, x = randn(2 * inner, 512, scale=0.1), randn(128, 512)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    truth = torch.nn.functional.silu(gate) * up
    for rows in (1, 9, 64, 128):
        out = poisoned(rows, inner)
        ops.gated_linear(x, weight, out, rows)
        assert relative_l2(out, truth[:rows]) < 3e-3  # one bf16 landing


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("shape", [*SHAPES[2:], (4096, 512), (8192, 2048), (2048, 10944)], ids=name)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    shape: tuple[int, int], gated: bool
) -> None:
    torch.manual_seed(3)
    ops = make_ops()
    m, k = shape
    weight, x = randn(m, k, scale=k**-0.5), randn(512, k)
    width = m // 2 if gated else m

    def run(first: int, rows: int) -> torch.Tensor:
        out = poisoned(rows, width, dtype=torch.bfloat16 if gated else torch.float32)
        product = ops.gated_linear if gated else ops.linear
        product(x[first:], weight, out, rows)
        return out

    alone = torch.cat([run(row, 1) for row in range(512)])
    assert not alone.isnan().any()
    for rows in BATCHES:
        first = 512 - rows  # another place in the batch than row 0
        assert torch.equal(run(first, rows), alone[first:]), rows
    assert torch.equal(run(0, 512), alone)


@pytest.mark.parametrize("shape", [(448, 1280), (20_000, 320)], ids=name)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
def test_every_kernel_of_hopper_gives_the_same_bits(gated: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(7)
    ops = make_ops()
    names = {n for key, (_, all_) in MEASURED.items() if key[2] == gated for n in all_.split()}
    m, k = shape  # a CTA has less than a tile of the small matrix, several of the other
    weight, x = randn(m, k, scale=0.03), randn(300, k)
    if not ops.takes(weight):
        pytest.skip("the kernels of sm_90a")
    width = m // 2 if gated else m
    residual = randn(300, width).float()
    for segments in (1,) if gated or k < 8 * BLOCK_K else (1, 2, 4, 8):
        for kind in (0,) if gated else (0, 1, 2):  # bf16, f32, added to f32
            alone = None
            for name in sorted(names):
                kernel = OTHERS.get(name) or parse(name, segments)
                if segments > 1 and name[0] in "tp":  # those that take turns
                    continue
                if kernel.ctas * kernel.segments != segments or kernel.smem > ops.library.max_smem:
                    continue
                out = poisoned(300, width, dtype=torch.float32 if kind else torch.bfloat16)
                if kind == 2:
                    out.copy_(residual)
                ops.hopper_product(x, weight, out, 300, kind, gated, kernel)
                alone = out if alone is None else alone
                assert torch.equal(out, alone), (segments, name, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_that_take_turns_also_store_where_the_copy_engine_cannot(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(11)
    ops = make_ops()
    weight, x = randn(20_000, 320, scale=0.03), randn(300, 320)
    if not ops.takes(weight):
        pytest.skip("the kernels of sm_90a")
    kind = int(dtype == torch.float32)
    turns = {
        (n, key[2]) for key, (_, all_) in MEASURED.items() for n in all_.split() if n[0] == "t"
    }
    for name, gated in sorted(turns):
        if gated and kind:
            continue
        kernel, width = parse(name, 1), 10_000 if gated else 20_000
        aligned, wide = poisoned(300, width, dtype=dtype), poisoned(300, width + 2, dtype=dtype)
        ops.hopper_product(x, weight, aligned, 300, kind, gated, kernel)
        ops.hopper_product(x, weight, wide[:, 1:-1], 300, kind, gated, kernel)
        assert torch.equal(wide[:, 1:-1], aligned), name
        assert wide[:, 0].isnan().all()
        assert wide[:, -1].isnan().all()


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("shape", [(70_000, 1088), (134, 64), (9000, 7168)], ids=name)
def test_strips_of_weight_rows_give_the_bits_of_boxes(shape: tuple[int, int], gated: bool) -> None:
    torch.manual_seed(12)
    ops = make_ops()
    m, k = shape
    wide, x = randn(m, k + 64, scale=0.03), randn(8, k + 128)[:, 64 : k + 64]
    weight, width = wide[:, 32 : k + 32], m // 2 if gated else m
    if not ops.takes(weight):
        pytest.skip("the kernels of sm_90a")
    boxes = parse("8.1.7.7" if gated else "8.1.8.8", 1)
    for kind in (0,) if gated else (0, 1, 2):  # bf16, f32, added to f32
        for rows in (1, 2, 5, 8):
            dtype = torch.float32 if kind else torch.bfloat16
            expected = torch.randn(rows, width + 3, device=x.device).to(dtype)
            found = expected.clone()
            ops.hopper_product(x, weight, expected[:, 1:-2], rows, kind, gated, boxes)
            ops.hopper_product(x, weight, found[:, 1:-2], rows, kind, gated, STRIPS)
            assert torch.equal(found, expected), (kind, rows)


@pytest.mark.parametrize("shape", [(7168, 8192), (7168, 18432), (300, 1088), (102, 128)], ids=name)
def test_rows_as_the_first_operand_give_the_bits_of_rows_as_the_second(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(13)
    ops = make_ops()
    m, k = shape
    weight, x = randn(m, k, scale=k**-0.5), randn(512, k)
    if not ops.takes(weight):
        pytest.skip("the kernels of sm_90a")
    other = parse("128.2.6.6s2", 2)
    for kind in (0, 1, 2):  # bf16, f32, added to f32
        for rows, width, first in ((512, m, 0), (257, m + 8, 4), (100, m + 3, 1), (1, m, 0)):
            dtype = torch.float32 if kind else torch.bfloat16
            expected = torch.randn(rows, width, device=x.device).to(dtype)
            found, place = expected.clone(), slice(first, first + m)
            ops.hopper_product(x, weight, expected[:, place], rows, kind, False, other)
            ops.hopper_product(x, weight, found[:, place], rows, kind, False, MANY_ROWS)
            assert torch.equal(found, expected), (kind, rows, width)


@pytest.mark.parametrize("shape", [(2048, 2048), (3648, 2048)], ids=name)
def test_ctas_that_hold_their_weights_give_the_bits_of_those_that_do_not(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(10)
    ops = make_ops()
    m, k = shape
    weight, wide, residual = randn(m, k, scale=0.03), randn(9, k + 64), randn(9, m + 8).float()
    if not ops.takes(weight):
        pytest.skip("the kernels of sm_90a")
    kernel, ring = whole(m, k), choose(m, k, 8, False)
    assert kernel is not None
    x = wide[:, 32 : k + 32]
    for kind in (0, 2):  # bf16, added to f32
        for rows in range(1, WHOLE_ROWS + 1):
            expected = residual.clone() if kind else residual.bfloat16()
            found = expected.clone()
            ops.hopper_product(x, weight, expected[:, :m], rows, kind, False, ring)
            ops.whole_product(x, weight, found[:, :m], rows, kind, kernel)
            assert torch.equal(found, expected), (kind, rows)


def test_accumulate_adds_to_the_residual_and_touches_no_other_row() -> None:
    torch.manual_seed(4)
    ops = make_ops()
    weight, x = randn(256, 512, scale=0.05), randn(128, 512)
    for rows in (3, 40, 128):
        product, out = poisoned(rows, 256, dtype=torch.float32), randn(128, 256).float()
        before = out.clone()
        ops.linear(x, weight, product, rows)
        ops.linear(x, weight, out, rows, accumulate=True)
        assert torch.equal(out[:rows], before[:rows] + product)
        assert torch.equal(out[rows:], before[rows:])


@pytest.mark.parametrize("rows", [2, 70])
def test_rows_may_be_strided_on_both_sides(rows: int) -> None:
    torch.manual_seed(5)
    ops = make_ops()
    weight, wide = randn(200, 256, scale=0.05), randn(rows, 640)
    out, plain = poisoned(rows, 333), poisoned(rows, 200)
    ops.linear(wide[:, 128:384], weight, out[:, 100:300], rows)
    ops.linear(wide[:, 128:384].contiguous(), weight, plain, rows)
    assert torch.equal(out[:, 100:300], plain)
    assert out[:, :100].isnan().all()
    assert out[:, 300:].isnan().all()


def test_replay_equals_eager() -> None:
    torch.manual_seed(6)
    ops = make_ops()
    weight, x = randn(3072, 1536, scale=0.05), randn(128, 1536)
    for rows in (1, 128):
        eager, replayed = poisoned(rows, 3072), poisoned(rows, 3072)
        ops.linear(x, weight, eager, rows)
        replay(partial(ops.linear, x, weight, replayed, rows), times=2)
        assert torch.equal(eager, replayed)


def test_a_k_that_is_no_multiple_of_32_is_refused_by_name() -> None:
    ops = make_ops()
    with pytest.raises(ValueError, match="k = 40 is not a multiple of 32"):
        ops.linear(randn(1, 40), randn(16, 40), poisoned(1, 16), 1)


@pytest.mark.parametrize("choices", [0, 3, 8, 11], ids="parts{}".format)
def test_a_norm_within_the_product_has_the_bits_of_norm_and_product(choices: int) -> None:
    torch.manual_seed(8)
    ops = make_ops()
    weight, norm_weight, adder = randn(3648, 2048, scale=0.02), randn(2048), randn(2048, 2048)
    if not ops.norms_in_product(weight, adder, 1):
        pytest.skip("the kernels of sm_90a")
    x = randn(1, 2048, dtype=torch.float32)
    parts = weighted_parts(choices)
    before, normed = x.clone(), poisoned(1, 2048)
    expected, found = poisoned(1, 3648), poisoned(1, 3648)
    ops.norm_linear(x, norm_weight, 1e-6, weight, found, *parts)
    assert torch.equal(x, before)
    ops.norm(x, norm_weight, 1e-6, normed, 1, *parts)
    ops.linear(normed, weight, expected, 1)
    assert torch.equal(found, expected)
    replayed = poisoned(1, 3648)
    replay(lambda: ops.norm_linear(before, norm_weight, 1e-6, weight, replayed, *parts), times=3)
    assert torch.equal(replayed, expected)


@pytest.mark.parametrize("choices", [3, 8, 11], ids="parts{}".format)
def test_parts_added_beside_a_product_have_the_bits_of_those_added_before(choices: int) -> None:
    torch.manual_seed(9)
    ops = make_ops()
    weight, x = randn(2048, 2048, scale=0.02), randn(1, 2048)
    if not ops.norms_in_product(weight, weight, 1):
        pytest.skip("the kernels of sm_90a")
    parts = weighted_parts(choices)
    expected = randn(2, 2048, dtype=torch.float32)
    found = expected.clone()
    ops.norm(expected, randn(2048), 1e-6, poisoned(1, 2048), 1, *parts)
    ops.linear(x, weight, expected, 1, accumulate=True)
    ops.linear(x, weight, found, 1, True, *parts)
    assert torch.equal(found, expected)


def weighted_parts(choices: int) -> tuple[torch.Tensor, ...]:
    """Parts of one row of 2048, of which one counts for nothing."""
    if choices == 0:
        return ()
    parts = randn(1, choices, 2048, dtype=torch.float32)
    weights = torch.rand(1, choices, device=parts.device) + 0.1
    weights[0, 1], parts[0, 1] = 0, torch.nan
    return parts, weights


def test_more_than_one_row_is_normed_by_a_node_of_its_own() -> None:
    ops = make_ops()
    weight, adder = randn(3648, 2048), randn(2048, 2048)
    assert not ops.norms_in_product(weight, adder, 2)
    assert not ops.norms_in_product(randn(3648, 4096), adder, 1)
