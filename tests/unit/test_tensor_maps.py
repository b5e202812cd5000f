"""Tensor maps are encoded once for what they describe."""

from __future__ import annotations

import math

import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.tensor_maps import TensorMaps


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []

    def tensor_map(*args: object) -> driver.TensorMap:
        calls.append(args)
        return driver.TensorMap()

    monkeypatch.setattr(driver, "tensor_map", tensor_map)
    return calls


def test_a_map_is_made_once_for_a_place_and_a_shape(encoded: list[tuple[object, ...]]) -> None:
    maps, matrix = TensorMaps(), torch.zeros(8, 128, dtype=torch.bfloat16)
    first = maps.get(matrix, 8, 64)
    assert maps.get(matrix[:], 8, 64) is first
    assert encoded == [(matrix.data_ptr(), (128, 8), (256,), (64, 64))]


def test_rows_boxes_columns_and_strides_tell_maps_apart(encoded: list[tuple[object, ...]]) -> None:
    maps, matrix = TensorMaps(), torch.zeros(8, 128, dtype=torch.bfloat16)
    for view, rows, box in (
        (matrix, 8, 64),
        (matrix, 7, 64),
        (matrix, 8, 32),
        (matrix[:, :64], 8, 64),
    ):
        maps.get(view, rows, box)
    assert len(encoded) == 4


def test_pairs_of_gate_and_up_rows_stay_inside_the_weights(
    encoded: list[tuple[object, ...]],
) -> None:
    experts, inner, k = 3, 64, 128
    gate_up = torch.zeros(experts, 2 * inner, k, dtype=torch.bfloat16)
    TensorMaps().get_pairs(gate_up, 4, 2)
    ((address, dims, strides, box),) = encoded
    assert (address, box) == (gate_up.data_ptr(), (64, 8, 2, 4, 2))
    assert isinstance(dims, tuple)
    assert isinstance(strides, tuple)
    last = sum((n - 1) * step for n, step in zip(dims, (2, *strides), strict=True))
    assert last == gate_up.numel() * 2 - 2  # the last element of the last expert's up rows
    feature = 17
    up_row = feature // 8 * strides[2] + feature % 8 * strides[0] + strides[1]
    assert up_row == (inner + feature) * k * 2


def test_blocks_of_some_rows_are_one_box(encoded: list[tuple[object, ...]]) -> None:
    matrix = torch.zeros(10, 192, dtype=torch.bfloat16)
    TensorMaps().get_blocks(matrix, 9, 8, 3)
    assert encoded == [
        (matrix.data_ptr(), (64, 9, 3, 1), (384, 128, 384), (64, 8, 3, 1)),
    ]


def test_groups_of_eight_rows_cover_a_matrix_once(encoded: list[tuple[object, ...]]) -> None:
    matrix = torch.zeros(48, 192, dtype=torch.bfloat16)[:, :128]
    TensorMaps().get_groups(matrix, 16, 4)
    ((address, dims, strides, box),) = encoded
    assert (address, box) == (matrix.data_ptr(), (64, 8, 4, 2))
    assert isinstance(dims, tuple)
    assert isinstance(strides, tuple)
    assert math.prod(dims) == matrix.numel()
    last = sum((n - 1) * step for n, step in zip(dims, (2, *strides), strict=True))
    assert last == (47 * 192 + 127) * 2
