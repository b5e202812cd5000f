"""What latent attention accepts, checked before anything is launched; shared by both backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROPE_DIM, ROW_DIM
from latentd_kernels.layer_weights import LayerWeights

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument

MAX_HEADS: Final = 128
MAX_CALL_ROWS: Final = 128
"""Most rows of one absorb, attend or expand call (csrc/splits.cuh, kMaxStepRows)."""
HEAD_WIDTHS: Final = ((128, 128), (192, 256))
"""(nope, v) pairs: DeepSeek and Kimi, GLM-4.7-Flash."""


def check_heads(heads: int, nope_dim: int, v_dim: int) -> None:
    """Raises ValueError naming a head count or head widths that have no kernel."""
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"{heads} attention heads: the kernels take 1 to {MAX_HEADS}")
    if (nope_dim, v_dim) not in HEAD_WIDTHS:
        known = " and ".join(f"{nope}/{v}" for nope, v in HEAD_WIDTHS)
        raise ValueError(f"head widths nope/v {nope_dim}/{v_dim}: there are kernels for {known}")


def check_rows(rows: int) -> None:
    """Raises ValueError for more rows than one call takes."""
    if not 1 <= rows <= MAX_CALL_ROWS:
        raise ValueError(f"{rows} rows in one attention call: 1 to {MAX_CALL_ROWS} fit")


def check_slab(slab: Tensor, layer: int) -> None:
    """Raises ValueError for a slab that is not whole pages of [layers, 64, 576] without gaps.

    Offsets are computed from the layer count alone, and 16-byte copies need rows that start on
    16 bytes: an odd page stride or a layer outside the page would read a neighbour's memory.
    """
    if slab.dim() != 4 or tuple(slab.shape[2:]) != (PAGE_SIZE, ROW_DIM):
        raise ValueError(
            f"slab shape {tuple(slab.shape)}: expected [pages, layers, {PAGE_SIZE}, {ROW_DIM}]"
        )
    layers = slab.shape[1]
    strides = (layers * PAGE_SIZE * ROW_DIM, PAGE_SIZE * ROW_DIM, ROW_DIM, 1)
    if slab.stride() != strides:
        raise ValueError(f"slab strides {slab.stride()}: expected {strides}, pages without gaps")
    if slab.data_ptr() % 16:
        raise ValueError(f"slab address {slab.data_ptr():#x}: expected a multiple of 16")
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} of a slab that has layers 0 to {layers - 1}")


def check_row_stride(name: str, x: Tensor, row_dim: int) -> int:
    """The row stride of a [rows, row_dim] activation. Raises ValueError for rows that 16-byte
    words cannot read."""
    if x.dim() != 2 or x.shape[1] != row_dim or x.stride(1) != 1:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: expected dense rows of {row_dim}")
    if x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(
            f"{name}: rows of stride {x.stride(0)} at {x.data_ptr():#x} must start on 16 bytes"
        )
    return x.stride(0)


def of_layers(kv_b: Tensor | LayerWeights, layer: Tensor) -> tuple[Tensor, list[Argument]]:
    """The weight that tells the shape, and the kernels' last two arguments: where the weights of
    all layers are and the layer that the step names, or nothing (that one weight)."""
    if isinstance(kv_b, LayerWeights):
        return kv_b.tensors[0], [kv_b.addresses, layer]
    return kv_b, [None, None]


def head_widths(kv_b: Tensor, heads: int, nope_dim: int) -> int:
    """v_dim of a kv_b_proj weight [heads * (nope + v), 512], everything checked."""
    if kv_b.dim() != 2 or kv_b.shape[1] != LATENT_DIM or kv_b.shape[0] % heads:
        raise ValueError(
            f"kv_b_proj of shape {tuple(kv_b.shape)} for {heads} heads: "
            f"expected [heads * (nope + v), {LATENT_DIM}]"
        )
    v_dim = kv_b.shape[0] // heads - nope_dim
    check_heads(heads, nope_dim, v_dim)
    return v_dim


def query_width(heads: int, nope_dim: int) -> int:
    """Columns of the query before absorption."""
    return heads * (nope_dim + ROPE_DIM)
