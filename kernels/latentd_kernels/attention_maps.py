"""What the copy engine of sm_90 knows of the slab and of absorbed queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM
from latentd_kernels.tensor_maps import BOX_K

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.driver import TensorMap
    from latentd_kernels.tensor_maps import TensorMaps

PAGE_PARTS: Final = (4, 5)
"""Boxes of 64 columns in the two parts in which a page is copied (attend.cuh, ring.cuh)."""
_BOXES: Final = ROW_DIM // BOX_K
_ROW_BYTES: Final = ROW_DIM * 2


def query_map(
    maps: TensorMaps, q_abs: Tensor, first_row: int, rows: int, tile_heads: int,
    tile_rows: int = 1,
) -> TensorMap:  # fmt: skip
    """q_abs as [9][rows][heads][64]: one copy brings some heads of some rows; heads and rows that
    are not there arrive as zeros."""
    row_bytes = q_abs.shape[1] * _ROW_BYTES
    return maps.of_bytes(
        q_abs.data_ptr() + first_row * row_bytes,
        (BOX_K, q_abs.shape[1], rows, _BOXES),
        (_ROW_BYTES, row_bytes, BOX_K * 2),
        (BOX_K, tile_heads, tile_rows, _BOXES),
    )


def page_map(maps: TensorMaps, slab: Tensor, layer: int, boxes: int) -> TensorMap:
    """A layer's slice of the slab as [pages][9][64 tokens][64]; page -1 arrives as zeros."""
    pages, layers = slab.shape[:2]
    layer_bytes = PAGE_SIZE * _ROW_BYTES
    return maps.of_bytes(
        slab.data_ptr() + layer * layer_bytes,
        (BOX_K, PAGE_SIZE, _BOXES, pages),
        (_ROW_BYTES, BOX_K * 2, layers * layer_bytes),
        (BOX_K, PAGE_SIZE, boxes, 1),
    )


def node_map(maps: TensorMaps, nodes: Tensor) -> TensorMap:
    """Nodes [nodes, heads, 512] as [nodes][8][heads][64] in boxes of 64 heads by 256 columns."""
    num, heads, columns = nodes.shape
    line = columns * 2
    return maps.of_bytes(
        nodes.data_ptr(),
        (BOX_K, heads, columns // BOX_K, num),
        (line, BOX_K * 2, heads * line),
        (BOX_K, 64, 4, 1),
    )
