"""An attend call, and what the copy engine of sm_90 knows of its slab, queries and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM
from latentd_kernels.tensor_maps import BOX_K

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.driver import TensorMap
    from latentd_kernels.ops import AttentionWorkspace
    from latentd_kernels.tensor_maps import TensorMaps

PAGE_PARTS: Final = (4, 5)
"""Boxes of 64 columns in the two parts in which a page is copied (attend.cuh, ring.cuh)."""
_BOXES: Final = ROW_DIM // BOX_K
_ROW_BYTES: Final = ROW_DIM * 2


class AttendCall(NamedTuple):
    """What `Ops.attend` is asked for: rows first_row .. first_row + rows of the step."""

    q_abs: Tensor
    slab: Tensor
    layer: int
    workspace: AttentionWorkspace
    first_row: int
    rows: int
    softmax_scale: float
    chunk: bool = False

    @property
    def heads(self) -> int:
        """Of the model."""
        return self.q_abs.shape[1]

    @property
    def queries_at(self) -> int:
        """Address of the first row's absorbed query."""
        return self.q_abs.data_ptr() + self.first_row * self.heads * _ROW_BYTES


def query_map(maps: TensorMaps, call: AttendCall, tile_heads: int, tile_rows: int = 1) -> TensorMap:
    """q_abs as [9][rows][heads][64], for the kernels of chunks and of the landed chain: one copy
    brings some heads of some rows; heads and rows that are not there arrive as zeros."""
    return maps.of_bytes(
        call.queries_at,
        (BOX_K, call.heads, call.rows, _BOXES),
        (_ROW_BYTES, call.heads * _ROW_BYTES, BOX_K * 2),
        (BOX_K, tile_heads, tile_rows, _BOXES),
    )


def row_query_map(
    maps: TensorMaps, call: AttendCall, tile_heads: int, boxes: int = _BOXES
) -> TensorMap:
    """q_abs as [rows][9][heads][64], for all others: one copy brings some heads of a row; heads
    that the model does not have arrive as zeros."""
    return maps.of_bytes(
        call.queries_at,
        (BOX_K, call.heads, _BOXES, call.rows),
        (_ROW_BYTES, BOX_K * 2, call.heads * _ROW_BYTES),
        (BOX_K, tile_heads, boxes, 1),
    )


def page_map(maps: TensorMaps, call: AttendCall, boxes: int) -> TensorMap:
    """A layer's slice of the slab as [pages][9][64 tokens][64]; page -1 arrives as zeros."""
    pages, layers = call.slab.shape[:2]
    layer_bytes = PAGE_SIZE * _ROW_BYTES
    return maps.of_bytes(
        call.slab.data_ptr() + call.layer * layer_bytes,
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
