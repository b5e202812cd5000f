"""Tensor maps are encoded once for what they describe."""

from __future__ import annotations

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
