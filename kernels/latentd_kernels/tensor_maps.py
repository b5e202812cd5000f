"""Tensor maps of what lies in device memory, encoded once and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd_kernels import driver

if TYPE_CHECKING:
    from torch import Tensor

BOX_K: Final = 64
"""Columns of a box: 128 bytes of bf16, the width of the swizzle."""
_MAX_KEPT: Final = 16384


class TensorMaps:
    """How the copy engine sees matrices of bf16 rows, by what a map describes.

    A map holds an address and a shape, not a tensor, so a kept one is right for whatever matrix
    lies there with that shape; it does not keep memory alive. Weights and static buffers make a few
    hundred; when chunks of ever new lengths have made too many, all are dropped and made again.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[object, ...], driver.TensorMap] = {}

    def get(self, matrix: Tensor, rows: int, box_rows: int) -> driver.TensorMap:
        """The first `rows` rows of a matrix [*, k] bf16 (row stride free) in boxes of `box_rows`
        rows by 64 columns, swizzled; rows beyond read as zeros."""
        address, k, stride = matrix.data_ptr(), matrix.shape[1], matrix.stride(0)
        key = (address, rows, k, stride, box_rows)
        return self._maps.get(key) or self._keep(
            key, address, (k, rows), (stride * 2,), (BOX_K, box_rows)
        )

    def of_bytes(
        self, address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> driver.TensorMap:
        """Any bf16 tensor, swizzled by 128 bytes: see driver.tensor_map."""
        key = (address, dims, strides, box)
        return self._maps.get(key) or self._keep(key, address, dims, strides, box)

    def _keep(
        self, key: tuple[object, ...], address: int, dims: tuple[int, ...],
        strides: tuple[int, ...], box: tuple[int, ...],
    ) -> driver.TensorMap:  # fmt: skip
        if len(self._maps) >= _MAX_KEPT:
            self._maps.clear()
        made = self._maps[key] = driver.tensor_map(address, dims, strides, box)
        return made
