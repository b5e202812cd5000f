from __future__ import annotations

import pytest
import torch

from launching import CUDA, make_ops, poisoned, randn, relative_l2, replay

pytestmark = pytest.mark.gpu

EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("dim", [8, 256, 512, 1536, 2048, 7168, 16384])
def test_norm_matches_float64(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ops = make_ops()
    wide, weight, out = randn(64, dim + 64, dtype=dtype), randn(dim), poisoned(64, dim)
    x = wide[:, 32 : dim + 32]
    ops.norm(x, weight, EPS, out, 64)
    assert relative_l2(out, rms_norm(x, weight)) < 3e-3  # one bf16 landing


def test_parts_are_added_in_order_and_stored_back() -> None:
    torch.manual_seed(2)
    ops = make_ops()
    rows, choices, dim = 33, 7, 2048
    x, weight, out = randn(rows, dim, dtype=torch.float32), randn(dim), poisoned(rows, dim)
    parts = randn(rows, choices, dim, dtype=torch.float32)
    part_weights = torch.rand(rows, choices, device=CUDA)
    expected = x.double() + (parts.double() * part_weights.double()[:, :, None]).sum(1)
    ops.norm(x, weight, EPS, out, rows, parts, part_weights)
    assert relative_l2(x, expected) < 1e-6  # f32 additions
    assert relative_l2(out, rms_norm(x, weight)) < 3e-3


def test_a_part_of_weight_zero_counts_for_nothing() -> None:
    torch.manual_seed(3)
    ops = make_ops()
    x, weight = randn(2, 256, dtype=torch.float32), randn(256)
    plain, with_parts = poisoned(2, 256), poisoned(2, 256)
    ops.norm(x, weight, EPS, plain, 2)
    parts = poisoned(2, 3, 256, dtype=torch.float32)
    ops.norm(x, weight, EPS, with_parts, 2, parts, torch.zeros(2, 3, device=CUDA))
    assert torch.equal(plain, with_parts)


def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_under_replay() -> None:
    torch.manual_seed(4)
    ops = make_ops()
    x, weight, out = randn(512, 2048, dtype=torch.float32), randn(2048), poisoned(512, 2048)
    ops.norm(x, weight, EPS, out, 512)
    alone = poisoned(512, 2048)
    for row in range(512):
        ops.norm(x[row:], weight, EPS, alone[row:], 1)
    assert torch.equal(out, alone)
    replayed = poisoned(512, 2048)
    replay(lambda: ops.norm(x, weight, EPS, replayed, 512))
    assert torch.equal(out, replayed)


def test_a_dimension_that_vectors_do_not_divide_is_refused() -> None:
    ops = make_ops()
    with pytest.raises(ValueError, match="dim = 12 is not a multiple of 8"):
        ops.norm(randn(1, 12), randn(12), EPS, poisoned(1, 12), 1)


def test_embed_copies_rows_and_zeroes_padding() -> None:
    torch.manual_seed(5)
    ops = make_ops()
    table, ids = randn(1000, 264), torch.tensor([3, -1, 999, 0, 3], dtype=torch.int32, device=CUDA)
    out = poisoned(6, 264, dtype=torch.float32)
    ops.embed(table, ids, out, 5)
    expected = table.float()[ids.clamp(min=0).long()]
    expected[1] = 0
    assert torch.equal(out[:5], expected)
    assert out[5].isnan().all()
