"""The cuda backend's operations: the launch groups joined into one object."""

from __future__ import annotations

from latentd_kernels.attend_rows import AttendRowLaunches
from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.limits import LimitLaunches
from latentd_kernels.moe import MoeLaunches
from latentd_kernels.sampling import SamplingLaunches
from latentd_kernels.scores import ScoreLaunches
from latentd_kernels.steps import StepLaunches


class CudaOps(
    AttentionLaunches, AttendRowLaunches, MoeLaunches, LimitLaunches, SamplingLaunches,
    ScoreLaunches, StepLaunches,
):  # fmt: skip
    """`Ops` over the cubins: every call is a few launches on the given stream, chained (all but
    zero_pages) with programmatic dependent launch; nothing is allocated, nothing is read back."""
