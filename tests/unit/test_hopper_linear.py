"""Which products go to the kernels of Hopper, and with what arguments; over a fake library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.dense import DenseLaunches
from latentd_kernels.linear_plan import parse
from recording import Recorder


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    def tensor_map(*args: Any, **rest: Any) -> driver.TensorMap:
        made.append(args)
        return driver.TensorMap()

    monkeypatch.setattr(driver, "tensor_map", tensor_map)
    return made


def launches(arch: str) -> tuple[DenseLaunches, Recorder]:
    library = Recorder(arch)
    nothing: Any = None
    return DenseLaunches(library, nothing, nothing, "f32", 0), library  # type: ignore[arg-type]


FORMS = ("linear", "gated")


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arch", "k", "hopper"),
    [("sm_90a", 128, True), ("sm_90a", 96, False), ("sm_80", 128, False), ("sm_100", 128, False)],
    ids=str,
)
def test_architecture_and_k_alone_decide_which_kernels_multiply(
    arch: str, k: int, hopper: bool, maps: list[tuple[Any, ...]]
) -> None:
    ops, library = launches(arch)
    for rows in (1, 8, 9, 64, 100, 128, 512):
        ops.linear(bf16(rows, k), bf16(200, k), bf16(rows, 200), rows)
        ops.gated_linear(bf16(rows, k), bf16(200, k), bf16(rows, 100), rows)
    names = [launch.name for launch in library.launches]
    assert len(names) == 14
    of_hopper = tuple(f"{form}_{how}n" for form in FORMS for how in ("", "turns_", "teams_"))
    assert all(name.startswith(of_hopper) == hopper for name in names)
    assert bool(maps) == hopper


def test_rows_beyond_those_of_the_call_are_never_read(maps: list[tuple[Any, ...]]) -> None:
    ops, _ = launches("sm_90a")
    x = bf16(128, 2048)
    ops.linear(x, bf16(576, 2048), bf16(128, 576), 3)
    assert (x.data_ptr(), (2048, 3), (4096,), (64, 8)) in maps


@pytest.mark.parametrize(
    ("features", "width", "dtype", "first", "vectors"),
    [
        (200, 200, torch.bfloat16, 0, True),
        (200, 333, torch.bfloat16, 0, False),
        (200, 400, torch.bfloat16, 2, False),
        (102, 104, torch.bfloat16, 0, False),
        (200, 200, torch.float32, 0, True),
        (200, 400, torch.float32, 2, False),
    ],
)
def test_results_are_stored_by_fours_where_they_are_aligned(
    features: int,
    width: int,
    dtype: torch.dtype,
    first: int,
    vectors: bool,
    maps: list[tuple[Any, ...]],
) -> None:
    ops, library = launches("sm_90a")
    out = torch.zeros(8, width, dtype=dtype)[:, first : first + features]
    ops.linear(bf16(8, 128), bf16(features, 128), out, 8)
    assert library.launches[0].args[-1].value == vectors


@pytest.mark.parametrize(
    ("width", "dtype", "stored", "vectors"),
    [
        (200, torch.bfloat16, True, True),
        (204, torch.bfloat16, False, False),  # rows that do not start at multiples of 16 bytes
        (204, torch.float32, True, True),
    ],
)
def test_the_copy_engine_stores_aligned_results(
    width: int, dtype: torch.dtype, stored: bool, vectors: bool, maps: list[tuple[Any, ...]]
) -> None:
    ops, library = launches("sm_90a")
    out, turns = torch.zeros(300, width, dtype=dtype), parse("t128.3.5", 1)
    kind = 0 if dtype == torch.bfloat16 else 1
    ops.hopper_product(bf16(300, 128), bf16(200, 128), out, 300, kind, False, turns)
    dims, strides = (100 * out.element_size(), 300), (width * out.element_size(),)
    assert ((out.data_ptr(), dims, strides, (64, 16)) in maps) == stored
    assert library.launches[0].args[-1].value == vectors


@pytest.mark.parametrize("name", ["t128.4.4", "p128.4.6"])
def test_gated_kernels_that_take_turns_load_gate_and_up_rows_by_eights(
    name: str, maps: list[tuple[Any, ...]]
) -> None:
    ops, _ = launches("sm_90a")
    weight = bf16(400, 192)[:, :128]
    ops.hopper_product(bf16(300, 128), weight, bf16(300, 200), 300, 0, True, parse(name, 1))
    dims, strides = (64, 8, 2, 25, 2), (384, 200 * 384, 8 * 384, 128)
    assert (weight.data_ptr(), dims, strides, (64, 8, 2, 4, 1)) in maps


def test_a_cluster_shares_the_segments_of_a_matrix(maps: list[tuple[Any, ...]]) -> None:
    ops, library = launches("sm_90a")
    ops.linear(bf16(9, 2048), bf16(2048, 2048), bf16(9, 2048), 9)
    ops.gated_linear(bf16(1, 2048), bf16(2048, 2048), bf16(1, 1024), 1)
    alone, gated = library.launches
    assert alone.cluster == (4, 1, 1)
    assert alone.grid == (4, 1, 32)
    assert gated.cluster is None


def test_few_rows_of_a_large_matrix_are_multiplied_from_strips(maps: list[tuple[Any, ...]]) -> None:
    ops, library = launches("sm_90a")
    weight = torch.empty((163840, 7168), dtype=torch.bfloat16, device="meta")
    x = bf16(5, 7168)
    ops.linear(x, weight, torch.empty(5, 163840), 5)
    ops.gated_linear(x, weight[:36864], bf16(5, 18432), 5)
    assert [launch.name for launch in library.launches] == ["linear_strips", "gated_strips"]
    assert {launch.grid[:2] for launch in library.launches} == {(1, 1)}
    assert maps == [(x.data_ptr(), (7168, 5), (14336,), (64, 8))]
    numbers = [[number.value for number in launch.args[5:]] for launch in library.launches]
    assert numbers == [[163840, 112, 5, 1], [18432, 112, 5, 0]]


def test_runs_of_blocks_come_as_groups_of_eight_weight_rows(maps: list[tuple[Any, ...]]) -> None:
    ops, library = launches("sm_90a")
    down = torch.empty((2048, 10944), dtype=torch.bfloat16, device="meta")
    head = torch.empty((163840, 7168), dtype=torch.bfloat16, device="meta")
    x, normed = bf16(9, 10944), bf16(20, 7168)
    ops.linear(x, down, torch.zeros(9, 2048), 9, accumulate=True)
    ops.linear(normed, head, torch.empty((20, 163840), device="meta"), 20)
    names = [launch.name for launch in library.launches]
    assert names == ["linear_runs_n16_g1_w4_x4_s2", "linear_turns_runs_n32_g2_w5"]
    assert maps[:4] == [
        (x.data_ptr(), (64, 9, 171, 1), (21888, 128, 21888), (64, 16, 4, 1)),
        (0, (64, 8, 171, 256), (21888, 128, 8 * 21888), (64, 8, 4, 8)),
        (normed.data_ptr(), (64, 20, 112, 1), (14336, 128, 14336), (64, 32, 2, 1)),
        (0, (64, 8, 112, 20480), (14336, 128, 8 * 14336), (64, 8, 2, 2)),
    ]


def test_many_rows_take_boxes_of_all_features_and_rows_of_a_cta(
    maps: list[tuple[Any, ...]],
) -> None:
    ops, library = launches("sm_90a")
    weight = torch.empty((7168, 8192), dtype=torch.bfloat16, device="meta")
    out = torch.zeros(500, 7169)
    for result in (out[:, :7168], torch.zeros(500, 7168)):
        ops.linear(bf16(500, 8192), weight, result, 500, accumulate=True)
    assert {(launch.name, launch.grid) for launch in library.launches} == {
        ("linear_rows", (2, 64, 1))
    }
    assert [box for *_, box in maps][:2] == [(64, 112), (64, 256)]
    numbers = [[number.value for number in launch.args[3:]] for launch in library.launches]
    assert numbers == [[7169, 7168, 128, 500, 2, 0], [7168, 7168, 128, 500, 2, 1]]


def test_few_rows_of_a_small_matrix_go_to_ctas_that_hold_their_weights(
    maps: list[tuple[Any, ...]],
) -> None:
    ops, library = launches("sm_90a")
    for rows, matrix, out, accumulate in (
        (8, bf16(3648, 2048), bf16(8, 3648), False),
        (1, bf16(2048, 2048), bf16(1, 2048).float(), True),
        (9, bf16(2048, 2048), bf16(9, 2048), False),
        (8, bf16(2048, 2048), bf16(8, 2048).float(), False),  # f32 out
        (8, bf16(2048, 2048), bf16(8, 2052)[:, :2048], False),  # rows that are not aligned
    ):
        ops.linear(bf16(rows, 2048), matrix, out, rows, accumulate)
    names = [launch.name for launch in library.launches]
    assert names[:2] == ["linear_whole_w16_bf16", "linear_whole_w8_add"]
    assert library.launches[0].grid == (2, 1, 57)
    assert all(name.startswith("linear_n") for name in names[2:])


def test_a_norm_in_a_product_and_parts_beside_one_are_no_launches_of_their_own(
    maps: list[tuple[Any, ...]],
) -> None:
    ops, library = launches("sm_90a")
    qkv_a, o, x = bf16(3648, 2048), bf16(2048, 2048), torch.zeros(1, 2048)
    parts = torch.zeros(1, 8, 2048), torch.zeros(1, 8)
    assert ops.norms_in_product(qkv_a, o, 1)
    ops.norm_linear(x, bf16(2048), 1e-6, qkv_a, bf16(1, 3648), *parts)
    ops.linear(bf16(1, 2048), o, x, 1, True, *parts)
    names = [launch.name for launch in library.launches]
    assert names == ["norm_linear_w16", "linear_whole_w8_add"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_where_the_norm_has_a_node_of_its_own_parts_are_refused_beside_a_product(
    arch: str, maps: list[tuple[Any, ...]]
) -> None:
    ops, _ = launches(arch)
    wide, square = bf16(3648, 2048), bf16(2048, 2048)
    assert not ops.norms_in_product(wide, square, 2)
    assert not ops.norms_in_product(wide, bf16(2048, 4096), 1)
    assert ops.norms_in_product(wide, square, 1) == (arch == "sm_90a")
    parts = torch.zeros(2, 8, 2048), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="norms_in_product"):
        ops.linear(bf16(1, 4096), bf16(2048, 4096), torch.zeros(1, 2048), 1, True, *parts)
    with pytest.raises(ValueError, match="norms_in_product"):
        ops.linear(bf16(2, 2048), square, torch.zeros(2, 2048), 2, True, *parts)
