"""Launches of the row-invariant products of sm_90a; csrc/hopper/linear*.cu compute them."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.launcher import HOPPER, Launcher
from latentd_kernels.linear_plan import (
    BLOCK_K,
    WHOLE_ROWS,
    WHOLE_THREADS,
    AnyKernel,
    LinearKernel,
    WholeKernel,
    choose,
    whole,
)
from latentd_kernels.linear_rows import RowsKernel
from latentd_kernels.linear_strips import StripKernel

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.driver import TensorMap
    from latentd_kernels.function import Argument

_VECTOR: Final = 4  # features that a thread stores at once
_COPIED_ROWS: Final = 64  # of weights, in a copy of a kernel that holds them
_STORED: Final = (64, 16)  # bf16 and rows of a result that the copy engine stores at once
_WHOLE_KINDS: Final = {0: "bf16", 2: "add"}  # OutKind in csrc/hopper/linear_parts.cuh
_VECTOR_X: Final = 8  # elements of which row strides are multiples, where rows are read by 16 bytes
_COPY_BYTES: Final = 16  # of which it wants multiples


class HopperLinear(Launcher):
    """The products of matrices whose K is a multiple of 64."""

    def takes(self, weight: Tensor) -> bool:
        """Whether these kernels multiply by the matrix: a question of geometry and architecture."""
        return self.library.arch == HOPPER and weight.shape[1] % BLOCK_K == 0

    def hopper_product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: int,
        kind: int,
        gated: bool,
        kernel: AnyKernel | None = None,
    ) -> None:
        """`linear` (kind: OutKind in csrc/hopper/linear.cuh) or `gated_linear`; `kernel` replaces
        the plan's choice, for tests."""
        weight_rows, k = weight.shape
        features = weight_rows // 2 if gated else weight_rows
        kernel = kernel or choose(weight_rows, k, rows, gated)
        if isinstance(kernel, StripKernel):
            self._strip_product(x, weight, out, rows, kind, gated, kernel)
            return
        if isinstance(kernel, RowsKernel):
            self._rows_product(x, weight, out, rows, kind, kernel)
            return
        vectors = _by_fours(out, features)
        height = kernel.height(weight_rows, rows, self.library.sm_count, gated)
        args: list[Argument] = [*self._operands(x, weight, rows, height, gated, kernel)]
        if kernel.turns:
            stored = self._stored(out, rows, features)
            vectors = vectors and stored is not None
            args.append(stored or args[0])
        else:
            args.append(c_int32(height))
        args += [
            out,
            c_int64(out.stride(0)),
            *map(c_int32, (features, k // BLOCK_K, rows, kind, vectors)),
        ]
        self.library.launch(
            ("gated_" if gated else "linear_") + kernel.variant,
            kernel.grid(weight_rows, rows, self.library.sm_count, gated),
            kernel.threads,
            args,
            stream=self.stream,
            smem=kernel.smem,
            cluster=kernel.cluster,
        )

    def _operands(
        self, x: Tensor, weight: Tensor, rows: int, height: int, gated: bool, kernel: LinearKernel
    ) -> tuple[TensorMap, TensorMap]:
        maps = self.tensor_maps
        if kernel.blocks > 1:
            runs = maps.get_blocks(x, rows, kernel.rows, kernel.blocks)
            return maps.get_groups(weight, height, kernel.blocks), runs
        pairs = gated and kernel.turns
        boxes = self._pairs(weight) if pairs else maps.get(weight, len(weight), height)
        return boxes, maps.get(x, rows, kernel.rows)

    def _strip_product(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, kind: int, gated: bool,
        kernel: StripKernel,
    ) -> None:  # fmt: skip
        weight_rows, k = weight.shape
        features = weight_rows // 2 if gated else weight_rows
        args: list[Argument] = [weight, c_int64(weight.stride(0) * 2)]
        args += [self.tensor_maps.get(x, rows, kernel.rows), out, c_int64(out.stride(0))]
        args += map(c_int32, (features, k // BLOCK_K, rows, kind))
        name = "gated_strips" if gated else "linear_strips"
        grid, stream = kernel.grid(features, rows, self.library.sm_count), self.stream
        self.library.launch(name, grid, kernel.threads, args, stream=stream, smem=kernel.smem)

    def _rows_product(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, kind: int, kernel: RowsKernel
    ) -> None:
        features, k = weight.shape
        args: list[Argument] = [self.tensor_maps.get(weight, features, kernel.features)]
        args += [self.tensor_maps.get(x, rows, kernel.rows), out, c_int64(out.stride(0))]
        args += map(c_int32, (features, k // BLOCK_K, rows, kind, _by_fours(out, features)))
        grid, stream = kernel.grid(features, rows), self.stream
        self.library.launch(
            "linear_rows", grid, kernel.threads, args, stream=stream, smem=kernel.smem
        )

    def whole_kernel(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, kind: int
    ) -> WholeKernel | None:
        """The kernel of few rows whose CTAs hold all their weights, None where another must."""
        if rows > WHOLE_ROWS or kind not in _WHOLE_KINDS or not self.takes(weight):
            return None
        aligned = (
            t.data_ptr() % _COPY_BYTES == 0 and t.stride(0) % _VECTOR_X == 0 for t in (x, out)
        )
        return whole(*weight.shape) if all(aligned) else None

    def whole_product(
        self, x: Tensor, weight: Tensor, out: Tensor, rows: int, kind: int, kernel: WholeKernel,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`linear` of few rows; for one row added to `out`, also the parts."""
        args: list[Argument] = [self._weights(weight), x, c_int64(x.stride(0)), out]
        args += [c_int64(out.stride(0)), c_int32(weight.shape[0]), c_int32(rows)]
        args += [parts, part_weights, c_int32(0 if parts is None else parts.shape[1])]
        name = f"linear_whole_w{kernel.blocks}_{_WHOLE_KINDS[kind]}"
        self._launch_whole(name, kernel, weight, args)

    def norms_in_product(self, weight: Tensor, adder: Tensor, rows: int) -> bool:
        """See `Ops.norms_in_product`."""
        if rows != 1 or not self.takes(weight) or not self.takes(adder):
            return False
        return whole(*weight.shape) is not None and whole(*adder.shape) is not None

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out: Tensor,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `Ops.norm_linear`."""
        kernel = whole(*weight.shape)
        assert kernel is not None
        args: list[Argument] = [self._weights(weight), x, norm_weight, c_float(eps), parts]
        args += [part_weights, c_int32(0 if parts is None else parts.shape[1]), out]
        self._launch_whole(f"norm_linear_w{kernel.blocks}", kernel, weight, args)

    def _weights(self, weight: Tensor) -> TensorMap:
        return self.tensor_maps.get(weight, weight.shape[0], _COPIED_ROWS)

    def _launch_whole(
        self, name: str, kernel: WholeKernel, weight: Tensor, args: list[Argument]
    ) -> None:
        grid = kernel.ctas, 1, weight.shape[0] // _COPIED_ROWS
        self.library.launch(name, grid, WHOLE_THREADS, args, stream=self.stream, smem=kernel.smem)

    def _pairs(self, weight: Tensor) -> TensorMap:
        """Gate and up rows in boxes of eight of either, four times. Coordinates: 0, 0, 0, feature
        / 8, column / 64."""
        inner, row = weight.shape[0] // 2, weight.stride(0) * 2
        dims = (BLOCK_K, 8, 2, inner // 8, weight.shape[1] // BLOCK_K)
        strides, box = (row, inner * row, 8 * row, BLOCK_K * 2), (BLOCK_K, 8, 2, 4, 1)
        return self.tensor_maps.of_bytes(weight.data_ptr(), dims, strides, box)

    def _stored(self, out: Tensor, rows: int, features: int) -> TensorMap | None:
        """How the copy engine stores a result, None if it cannot; an f32 counts as two bf16."""
        stride_bytes = out.stride(0) * out.element_size()
        if out.data_ptr() % _COPY_BYTES or stride_bytes % _COPY_BYTES:
            return None
        dims, strides = (features * (out.element_size() // 2), rows), (stride_bytes,)
        return self.tensor_maps.of_bytes(out.data_ptr(), dims, strides, _STORED)


def _by_fours(out: Tensor, features: int) -> bool:
    """Whether four neighbouring features of a result may be stored at once."""
    aligned = out.data_ptr() % (_VECTOR * out.element_size()) == 0
    return aligned and features % _VECTOR == 0 and out.stride(0) % _VECTOR == 0
