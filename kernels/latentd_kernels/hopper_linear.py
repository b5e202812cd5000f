"""Launches of the row-invariant products of sm_90a; csrc/hopper/linear*.cu compute them."""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.launcher import HOPPER, Launcher
from latentd_kernels.linear_plan import BLOCK_K, LinearKernel, choose

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.driver import TensorMap
    from latentd_kernels.function import Argument

_COPIED_ROWS: Final = 64  # of weights in a copy; of gates and of ups half of it for LinearCta
_VECTOR: Final = 4  # features that a thread stores at once
_STORED: Final = (64, 16)  # features and rows of a result that the copy engine stores at once
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
        kernel: LinearKernel | None = None,
    ) -> None:
        """`linear` (kind: OutKind in csrc/hopper/linear.cuh) or `gated_linear`; `kernel` replaces
        the plan's choice, for tests."""
        weight_rows, k = weight.shape
        features = weight_rows // 2 if gated else weight_rows
        kernel = kernel or choose(weight_rows, k, rows, gated)
        vector_bytes = _VECTOR * out.element_size()
        vectors = (
            features % _VECTOR == 0
            and out.stride(0) % _VECTOR == 0
            and out.data_ptr() % vector_bytes == 0
        )
        copied = _COPIED_ROWS // 2 if gated and not kernel.turns else _COPIED_ROWS
        args: list[Argument] = [
            self.tensor_maps.get(weight, weight_rows, copied),
            self.tensor_maps.get(x, rows, kernel.rows),
        ]
        if kernel.turns:
            stored = self._stored(out, rows, features) if out.element_size() == 2 else None
            vectors = vectors and (stored is not None or out.element_size() != 2)
            args.append(stored or args[0])
        args += [
            out,
            c_int64(out.stride(0)),
            *map(c_int32, (features, k // BLOCK_K, rows, kind, vectors)),
        ]
        self.library.launch(
            ("gated_" if gated else "linear_") + kernel.variant,
            kernel.grid(weight_rows, rows, self.library.sm_count),
            kernel.threads,
            args,
            stream=self.stream,
            smem=kernel.smem,
            cluster=kernel.cluster,
        )

    def _stored(self, out: Tensor, rows: int, features: int) -> TensorMap | None:
        """How the copy engine stores a bf16 result, None if it cannot."""
        stride_bytes = out.stride(0) * 2
        if out.data_ptr() % _COPY_BYTES or stride_bytes % _COPY_BYTES:
            return None
        dims, strides = (features, rows), (stride_bytes,)
        return self.tensor_maps.of_bytes(out.data_ptr(), dims, strides, _STORED)
