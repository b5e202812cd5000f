"""Launches of embed, norm, linear and gated_linear; csrc/{elementwise,linear}.cu compute them.

On sm_90a the products of matrices whose K is a multiple of 64 are those of `hopper_linear`.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels.hopper_linear import HopperLinear

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument

_THREADS: Final = 256  # of embed, norm and the wide tiled product
_OUT_BF16, _OUT_F32, _OUT_ACCUMULATE = 0, 1, 2  # OutKind in csrc/linear.cu
_HALF_K: Final = 32  # product.cuh
_TILE_ROWS: Final = 64
_SKINNY_ROWS: Final = 32  # up to here the skinny product always wins (H200)
_FEW_WEIGHT_ROWS: Final = 4096  # up to here it wins for 64 rows as well
_STAGES: Final = 4
MAX_NORM_DIM: Final = 16384


def num_runs(weight_rows: int) -> int:
    """Runs to which K's chunks are dealt: a property of the matrix alone, as it decides bits.

    Matrices with few 16-row tiles get more warps a tile, so that enough loads are in flight.
    """
    return 16 if weight_rows <= 2560 else 8


def tiled_smem(features: int) -> int:
    """Bytes of shared memory of a tiled product with that many weight rows a CTA."""
    return (features + _TILE_ROWS) * 128 * _STAGES


def require_rows(name: str, x: Tensor, what: str) -> None:
    """Refuse activations that 16-byte loads cannot read."""
    if x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        raise ValueError(
            f"{name}: {what} needs contiguous, 16-byte aligned rows, not strides {x.stride()}"
        )


def require_k(name: str, k: int) -> None:
    """Refuse a K that the products cannot cut."""
    if k % _HALF_K:
        raise ValueError(f"{name}: k = {k} is not a multiple of {_HALF_K}")


class DenseLaunches(HopperLinear):
    """embed, norm, linear and gated_linear."""

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, rows: int) -> None:
        """See `Ops.embed`."""
        require_rows("embed", out, "out")
        args: list[Argument] = [
            table,
            token_ids,
            out,
            c_int32(table.shape[1]),
            c_int64(out.stride(0)),
        ]
        self.library.launch("embed", (rows, 1, 1), _THREADS, args, stream=self.stream)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        rows: int,
        parts: Tensor | None = None,
        part_weights: Tensor | None = None,
    ) -> None:
        """See `Ops.norm`."""
        dim = weight.shape[0]
        if dim % 8 or dim > MAX_NORM_DIM:
            raise ValueError(f"norm: dim = {dim} is not a multiple of 8 up to {MAX_NORM_DIM}")
        require_rows("norm", x, "x")
        require_rows("norm", out, "out")
        args: list[Argument] = [x, weight, c_float(eps), out, c_int32(dim), c_int64(x.stride(0))]
        args.append(c_int64(out.stride(0)))
        name = "norm_bf16"
        if x.dtype == torch.float32:
            name = "norm_f32"
            choices = 0 if parts is None else parts.shape[1]
            args += [parts, part_weights, c_int32(choices)]
        elif parts is not None:
            raise ValueError("norm: parts are added to float32 rows only")
        self.library.launch(name, (rows, 1, 1), _THREADS, args, stream=self.stream)

    def linear(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, accumulate: bool = False,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `Ops.linear`."""
        if accumulate and out.dtype != torch.float32:
            raise ValueError(f"linear: accumulates into float32, not {out.dtype}")
        kind = _OUT_ACCUMULATE if accumulate else _OUT_F32
        kind = _OUT_BF16 if out.dtype == torch.bfloat16 else kind
        kernel = self.whole_kernel(x, weight, out, rows, kind)
        if parts is not None and (kernel is None or rows > 1 or not accumulate):
            raise ValueError("linear: parts are added where norms_in_product says so only")
        if kernel is not None:
            require_rows("linear", x, "x")
            self.whole_product(x, weight, out, rows, kind, kernel, parts, part_weights)
            return
        self._product("linear", x, weight, out, rows, weight.shape[0], 16, kind)

    def gated_linear(self, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
        """See `Ops.gated_linear`."""
        self._product("gated", x, weight, out, rows, weight.shape[0] // 2, 8, _OUT_BF16)

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: int,
        features: int,
        tile_features: int,
        kind: int,
    ) -> None:
        weight_rows, k = weight.shape
        require_k(name, k)
        require_rows(name, x, "x")
        if self.takes(weight):
            self.hopper_product(x, weight, out, rows, kind, gated=name == "gated")
            return
        args: list[Argument] = [weight, x, out, c_int32(features), c_int32(k), c_int32(rows)]
        args += [c_int64(x.stride(0)), c_int64(out.stride(0)), c_int32(kind)]
        runs = num_runs(weight_rows)
        m_tiles = -(-features // tile_features)
        if rows <= _SKINNY_ROWS or (rows <= _TILE_ROWS and weight_rows <= _FEW_WEIGHT_ROWS):
            tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
            kernel = f"{name}_skinny_r{tiles}_s{runs}"
            if (tiles, runs) == (1, 8) and m_tiles <= 2 * self.library.sm_count:
                kernel += "_deep"
            smem = tiles * runs * 512
            self.library.launch(
                kernel, (m_tiles, 1, 1), runs * 32, args, stream=self.stream, smem=smem
            )
            return
        row_tiles = -(-rows // _TILE_ROWS)
        wide = -(-weight_rows // 128) * row_tiles >= self.library.sm_count
        height = 128 if wide else 32
        grid = (row_tiles, -(-features // (height // 16 * tile_features)), 1)
        kernel = f"{name}_tiled_f{height}_s{runs}"
        threads, smem = (_THREADS if wide else 128), tiled_smem(height)
        self.library.launch(kernel, grid, threads, args, stream=self.stream, smem=smem)
