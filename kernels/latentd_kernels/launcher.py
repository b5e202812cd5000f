"""What every group of kernel launches shares: the library, the stream, the buffers of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd_kernels.tensor_maps import TensorMaps
from latentd_kernels.work_plan import MAX_CTAS

if TYPE_CHECKING:
    from latentd_kernels.library import Library
    from latentd_kernels.ops import Numerics, StepInputs
    from latentd_kernels.staging import StepRing

HOPPER: Final = "sm_90a"


class Launcher:
    """Base of the launch groups that `CudaOps` joins. It makes tensor maps, and keeps references to
    all else so that captured graphs never outlive the buffers they name."""

    def __init__(
        self, library: Library, inputs: StepInputs, ring: StepRing, numerics: Numerics, stream: int
    ) -> None:
        """`stream` is a CUstream handle; all launches go to it, in order."""
        self.library = library
        self.inputs = inputs
        self.ring = ring
        self.numerics = numerics
        self.stream = stream
        self.tensor_maps = TensorMaps()

    @property
    def plans_work(self) -> bool:
        """Whether attention runs on the kernels that follow the work list of `stage`."""
        return self.library.arch == HOPPER and self.numerics == "f32"

    @property
    def lands_on_hopper(self) -> bool:
        """Whether attention runs on the landed kernels of sm_90a."""
        return self.library.arch == HOPPER and self.numerics == "landed"

    @property
    def num_ctas(self) -> int:
        """CTAs of the grid that the work list serves: one an SM."""
        return min(MAX_CTAS, self.library.sm_count)
