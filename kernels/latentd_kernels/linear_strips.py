"""How csrc/hopper/linear_strips.cu is launched: plain integers, no torch, no GPU."""

from __future__ import annotations

from typing import Final, NamedTuple

_ROWS, _WARPS, _STAGES = 8, 4, 3  # of linear_strips.cuh
_WARP_ROWS: Final = 16  # weight rows of a warp that multiplies
_STRIP_BYTES: Final = 1024
_BARRIER_BYTES: Final = 1024
_ALIGN_BYTES: Final = 1024


class StripKernel(NamedTuple):
    """`LinearStrips`: at most eight rows, K in one segment, a CTA an SM."""

    rows: int = _ROWS
    segments: int = 1
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: as many warps copy as multiply."""
        return 2 * 32 * _WARPS

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: barriers, and strips of weights and of activations."""
        stage = (_WARP_ROWS * _WARPS + _ROWS) * _STRIP_BYTES
        return _ALIGN_BYTES + _BARRIER_BYTES + _STAGES * stage

    def grid(self, features: int, rows: int, num_sms: int) -> tuple[int, int, int]:
        """CTAs for a card of `num_sms` SMs: each has an equal share of the features."""
        return 1, -(-rows // self.rows), min(num_sms, features)


STRIPS: Final = StripKernel()
