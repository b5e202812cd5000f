"""How csrc/hopper/linear_rows.cu is launched: plain integers, no torch, no GPU."""

from __future__ import annotations

from typing import Final, NamedTuple

_GROUPS: Final = 4  # of linear_rows.cuh, of 64 batch rows
_FEATURES, _STAGES_W, _STAGES_X = 112, 5, 3
_BARRIER_BYTES: Final = 1024
_ALIGN_BYTES: Final = 1024


class RowsKernel(NamedTuple):
    """`LinearRows`: many rows, K in two segments, a CTA an SM."""

    rows: int = 64 * _GROUPS
    features: int = _FEATURES
    segments: int = 2
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the warpgroups that multiply, and one that copies."""
        return 128 * (_GROUPS + 1)

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: barriers, rings, and half of the first segment's sums."""
        rings = (_STAGES_W * self.features + _STAGES_X * self.rows) * 128
        return _ALIGN_BYTES + _BARRIER_BYTES + rings + self.rows * self.features * 2

    def grid(self, features: int, rows: int) -> tuple[int, int, int]:
        """CTAs for a matrix, whatever the card."""
        return -(-rows // self.rows), -(-features // self.features), 1


MANY_ROWS: Final = RowsKernel()
