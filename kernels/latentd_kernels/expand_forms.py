"""The forms of expand on sm_90a, f32 mode: which kernel a call takes, and its shared memory.

No form enters the arithmetic.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from latentd_kernels.geometry import LATENT_DIM, MAX_SPLITS


class ExpandForm(NamedTuple):
    """Rows of W_UV a CTA, CTAs a cluster, warps that share a row's nodes, rows a CTA: expand.cu's
    Form, or QUARTERED or ONE_ROW."""

    values: int
    cluster: int
    parts: int
    cta_rows: int

    @property
    def is_quartered(self) -> bool:
        """Whether a cluster shares the columns of o_lat to the end: expand_quarters.cu."""
        return self.cluster == 4

    @property
    def has_one_row(self) -> bool:
        """Whether a CTA asks for all nodes of its one row at once: expand_row.cu."""
        return self.values == 128 and self.parts == 8

    @property
    def name(self) -> str:
        """Entry point."""
        if self.is_quartered:
            return "expand_hopper_quarters"
        if self.has_one_row:
            return "expand_hopper_row"
        return f"expand_hopper_{self.values}_c{self.cluster}_p{self.parts}"

    @property
    def max_rows(self) -> int:
        """Most rows of a CTA."""
        return 1 if self.is_quartered or self.has_one_row else 64

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 256 if self.values == 32 else 512

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: sizeof(Smem) in expand.cu, or ROW_SMEM."""
        if self.is_quartered:
            return 0
        if self.has_one_row:
            return ROW_SMEM
        line, warps, tiles = LATENT_DIM * 2 + 64, self.threads // 32, self.values // 16
        pass_rows = warps * self.cluster // 2 // self.parts
        rows = pass_rows * (2 if pass_rows == 8 and self.values == 128 else 1)
        weights = 16 if self.values == 32 else self.values * line
        groups = 16 if self.parts == 1 else 8 // self.parts * warps * (256 + 1) * 4
        slices = (warps // tiles - 1) * -(-rows // 8) * tiles * 512
        tile_ml = 16 if self.parts == 1 else pass_rows * MAX_SPLITS * 8
        latent = self.cluster * rows * line
        return weights + latent + 128 * self.threads + groups + slices + tile_ml + 65 * 16


ROW_SMEM: Final = 153_152
"""sizeof(Smem) in expand_row.cu."""

QUARTERED: Final = ExpandForm(32, 4, 16, 1)
"""expand_quarters.cu: one row a CTA, of heads with 128 values. It needs little shared memory and so
waits beside attend; with more rows each would read W_UV once more."""

ONE_ROW: Final = ExpandForm(128, 1, 8, 1)
"""expand_row.cu: one row a CTA, of many heads or of heads with 256 values."""


def expand_form(rows: int, heads: int, v_dim: int) -> ExpandForm:
    """The form for a call of `rows` rows."""
    if heads >= 64 or v_dim == 256:
        return ONE_ROW if rows == 1 else ExpandForm(128, 1, 1, min(rows, 64))
    if rows == 1:
        return QUARTERED
    if rows == 2:
        return ExpandForm(32, 2, 8, 1)
    if rows <= 4:
        return ExpandForm(64, 2, 8, 2)
    if rows <= 8:
        return ExpandForm(64, 2, 1, 4)
    return ExpandForm(64, 2, 1, 8 if rows <= 16 else 16)
