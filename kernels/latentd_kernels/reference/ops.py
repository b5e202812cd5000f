"""The cpu backend's operations: the reference groups joined into one object."""

from __future__ import annotations

from latentd_kernels.reference.attend_rows import ReferenceAttendRows
from latentd_kernels.reference.attention import ReferenceAttention
from latentd_kernels.reference.limits import ReferenceLimits
from latentd_kernels.reference.moe import ReferenceMoe
from latentd_kernels.reference.sampling import ReferenceSampling
from latentd_kernels.reference.scores import ReferenceScores
from latentd_kernels.reference.steps import ReferenceSteps


class ReferenceOps(
    ReferenceAttention,
    ReferenceAttendRows,
    ReferenceMoe,
    ReferenceLimits,
    ReferenceSampling,
    ReferenceScores,
    ReferenceSteps,
):
    """`Ops` in torch on the host. A row's result depends on that row alone: not on the other rows,
    nor on where its buffers lie."""
