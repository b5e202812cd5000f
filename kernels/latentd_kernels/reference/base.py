"""What every group of reference operations shares: the step's buffers and the numerics mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentd_kernels.ops import Numerics, StepInputs
    from latentd_kernels.staging import StepRing


class ReferenceBase:
    """Base of the reference groups that `ReferenceOps` joins."""

    def __init__(self, inputs: StepInputs, ring: StepRing, numerics: Numerics) -> None:
        self.inputs = inputs
        self.ring = ring
        self.numerics = numerics
