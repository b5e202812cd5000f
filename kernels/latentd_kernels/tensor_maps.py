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

    def get_pairs(self, gate_up: Tensor, box_pairs: int, box_blocks: int) -> driver.TensorMap:
        """Gate and up rows of experts [experts, 2 * inner, k] bf16, contiguous, in boxes of
        `box_blocks` times 64 columns of `box_pairs` times 8 gate rows and the 8 up rows of the same
        features. Coordinates: 0, 0, 0, row / 8, column / 64."""
        experts, height, k = gate_up.shape
        inner, row = height // 2, k * 2
        dims = (BOX_K, 8, 2, (experts * height - inner) // 8, k // BOX_K)
        strides, box = (row, inner * row, 8 * row, BOX_K * 2), (BOX_K, 8, 2, box_pairs, box_blocks)
        return self.of_bytes(gate_up.data_ptr(), dims, strides, box)

    def get_blocks(
        self, matrix: Tensor, rows: int, box_rows: int, box_blocks: int
    ) -> driver.TensorMap:
        """The first `rows` rows of a matrix [*, k] bf16 (row stride free) in boxes of `box_rows`
        rows by `box_blocks` times 64 columns, block of 64 columns by block; what lies beyond reads
        as zeros. Coordinates: 0, row, column / 64, 0."""
        row = matrix.stride(0) * 2
        dims, strides = (BOX_K, rows, matrix.shape[1] // BOX_K, 1), (row, BOX_K * 2, row)
        return self.of_bytes(matrix.data_ptr(), dims, strides, (BOX_K, box_rows, box_blocks, 1))

    def get_groups(self, matrix: Tensor, box_rows: int, box_blocks: int) -> driver.TensorMap:
        """A matrix [rows, k] bf16 (row stride free, rows a multiple of 8) in boxes of `box_rows`
        rows (so too) by `box_blocks` times 64 columns: one group of eight rows after the other,
        block of 64 columns by block. Coordinates: 0, 0, column / 64, row / 8."""
        row, (rows, k) = matrix.stride(0) * 2, matrix.shape
        dims, strides = (BOX_K, 8, k // BOX_K, rows // 8), (row, BOX_K * 2, 8 * row)
        box = BOX_K, 8, box_blocks, box_rows // 8
        return self.of_bytes(matrix.data_ptr(), dims, strides, box)

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
