"""The cuda backend's operations: the launch groups joined into one object."""

from __future__ import annotations

from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.moe import MoeLaunches
from latentd_kernels.sampling import SamplingLaunches
from latentd_kernels.steps import StepLaunches


class CudaOps(AttentionLaunches, MoeLaunches, SamplingLaunches, StepLaunches):
    """`Ops` over the cubins: every call is one to three launches on the given stream, chained with
    programmatic dependent launch; nothing is allocated and nothing is read back."""
