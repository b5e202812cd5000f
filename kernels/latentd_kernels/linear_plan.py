"""Which kernel of csrc/hopper/linear.cu multiplies by a matrix: plain integers, no torch, no GPU.

`num_segments` decides bits and follows from the matrix alone. The rest is speed: it may follow the
number of rows, as all kernels of a matrix give the same bits.
"""

from __future__ import annotations

import re
from functools import cache
from math import log2
from typing import Final, NamedTuple, TypeAlias

from latentd_kernels.linear_rows import MANY_ROWS, RowsKernel
from latentd_kernels.linear_strips import STRIPS, StripKernel
from latentd_kernels.linear_table import MEASURED, ROWS

BLOCK_K: Final = 64
"""k of a block of the rings: K is a multiple of it."""
_PANEL: Final = 64  # weight rows of a warpgroup
_FULL_CARD: Final = 112  # panels times segments that leave too many of 132 SMs idle
_NAME: Final = re.compile(r"([tp]?)(\d+)\.(\d+)\.(\d+)(?:\.(\d+))?(?:s(\d+))?(e?)(l?)(r?)")
_BARRIER_BYTES: Final = 1024
_ALIGN_BYTES: Final = 1024
WHOLE_ROWS: Final = 8
WHOLE_THREADS: Final = 160
_RUN, _TURNS_RUN = 4, 2  # blocks of k that a stage of linear.cuh and of linear_turns.cuh may hold
_UNIT: Final = 16  # weight rows that the kernels of linear_turns.cuh deal out
_FOUR: Final = 4  # features that a thread stores at once
_EIGHT: Final = 8  # weight rows that are copied together: by runs, and in a kernel that takes turns
_STORE_BYTES: Final = 8192  # of a warpgroup of a kernel of linear_turns.cuh
_SM_SMEM: Final = 228 * 1024
_CTA_SMEM: Final = 1024  # that the system takes of it for each CTA
_SM_THREADS: Final = 2048


class LinearKernel(NamedTuple):
    """One instance of `LinearCta` or `LinearTurns` and how it is launched."""

    rows: int  # batch rows of a CTA
    groups: int  # warpgroups of 64 weight rows
    stages_w: int
    stages_x: int
    segments: int  # of K, one after the other in a CTA
    ctas: int  # that share a tile's segments
    teams: int = 0  # of warpgroups, in a CTA that takes one tile after the other
    even: bool = False  # panels are made lower until the tiles fill whole rounds of the card
    late: bool = False  # the next kernel starts only when its last block is on its way
    blocks: int = 1  # of k, in a stage

    @property
    def variant(self) -> str:
        """The part of the entry point's name behind linear_ or gated_."""
        n, g, w, x, s = self[:5]
        runs, turns = "runs_" * (self.blocks > 1), ("", "turns_", "teams_")[self.teams]
        if turns:
            return f"{turns}{runs}n{n}_g{g}_w{w}"
        return f"{runs or 'late_' * self.late}n{n}_g{g}_w{w}_x{x}_s{s}"

    @property
    def turns(self) -> bool:
        """Whether it is an instance of `LinearTurns`."""
        return self.teams > 0

    @property
    def threads(self) -> int:
        """Threads of a CTA: warpgroups, and those that copy: copying_threads in linear.cuh."""
        if self.groups == 5 and self.rows >= 128:
            return 128 * self.groups
        two_sums = self.groups == 3 and self.rows == 128 and self.segments > 1
        deals = self.teams > 1 or two_sums  # registers
        return 128 * self.groups + (128 if deals else 32)

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: barriers, rings, where sums lie or arrive, and half of
        those of a first segment for which the registers have no room."""
        features = _PANEL * self.groups // max(1, self.teams)
        ring = self.blocks * (self.stages_w * features + self.stages_x * self.rows) * 128
        if self.turns:
            return _ALIGN_BYTES + _BARRIER_BYTES + ring + self.groups * _STORE_BYTES
        sums = self.rows * (features + 4 * self.ctas) * 4
        in_ring = self.ctas == 1 or (self.rows >= 64 and ring >= 2 * sums)
        parked = self.rows * features * 2 if self.segments > 1 and self.rows > 128 else 0
        used = max(ring, sums) if in_ring else ring + sums
        return _ALIGN_BYTES + _BARRIER_BYTES + used + parked

    def at_once(self, rows: int, num_sms: int) -> int:
        """Tiles of weight rows that a card of `num_sms` SMs takes in one round."""
        resident = min(_SM_SMEM // (self.smem + _CTA_SMEM), _SM_THREADS // self.threads)
        return max(1, resident * num_sms // (self.ctas * -(-rows // self.rows)))

    def height(self, weight_rows: int, rows: int, num_sms: int, gated: bool) -> int:
        """Features of a panel, or whatever a box of the weights' map has."""
        most = _PANEL // 2 if gated else _PANEL
        if self.turns:
            return _UNIT if self.blocks > 1 else _PANEL
        if not self.even:
            return most
        features, at_once = weight_rows // (2 if gated else 1), self.at_once(rows, num_sms)
        rounds = -(-features // (most * self.groups * at_once))
        fours = -(-features // (_FOUR * self.groups * at_once * rounds))
        return min(most, _FOUR * fours)

    def grid(
        self, weight_rows: int, rows: int, num_sms: int, gated: bool = False
    ) -> tuple[int, int, int]:
        """CTAs for a matrix (of a gated product: gate and up rows) on a card of `num_sms` SMs."""
        row_tiles = -(-rows // self.rows)
        if self.turns:
            units = -(-weight_rows // ((2 if gated else 1) * _UNIT))
            return row_tiles, min(self.at_once(rows, num_sms), units), 1
        height = self.height(weight_rows, rows, num_sms, gated)
        tiles = -(-weight_rows // ((2 if gated else 1) * height * self.groups))
        return self.ctas, row_tiles, tiles

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Shape of a cluster, None for single CTAs."""
        return (self.ctas, 1, 1) if self.ctas > 1 else None


AnyKernel: TypeAlias = LinearKernel | StripKernel | RowsKernel
OTHERS: Final[dict[str, StripKernel | RowsKernel]] = {"strips": STRIPS, "rows": MANY_ROWS}
"""What the table names beside instances of `LinearKernel`."""


def num_segments(weight_rows: int, k: int) -> int:
    """Segments of K whose partial sums are added as a tree: a property of the matrix alone.

    As measured; for other matrices enough to give nearly every SM of an H200 a CTA when each takes
    one segment of 64 weight rows. A gated product has one segment.
    """
    measured = MEASURED.get((weight_rows, k, False))
    if measured is not None:
        return measured[0]
    panels, segments = -(-weight_rows // _PANEL), 1
    while segments < 8 and panels * segments <= _FULL_CARD and 4 * segments * BLOCK_K <= k:
        segments *= 2
    return segments


@cache
def choose(weight_rows: int, k: int, rows: int, gated: bool) -> AnyKernel:
    """The kernel for `rows` batch rows: that of the most similar matrix measured."""
    segments = 1 if gated else num_segments(weight_rows, k)
    matrix = (weight_rows, k, gated)
    if matrix not in MEASURED:
        matrix = min(
            (m for m in MEASURED if m[2] == gated and MEASURED[m][0] == segments),
            key=lambda m: abs(log2(m[0] / weight_rows)) + abs(log2(m[1] / k)),
        )
    names = MEASURED[matrix][1].split()
    if weight_rows % (2 * _EIGHT if gated else _EIGHT):  # what is copied by eights could not be
        names = [name for name in names if name[-1] != "r" and not (gated and name[0] in "tp")]
    place = next((i for i, most in enumerate(ROWS) if rows <= most), len(ROWS) - 1)
    name = names[min(place, len(names) - 1)]
    return OTHERS.get(name) or parse(name, segments)


class WholeKernel(NamedTuple):
    """One instance of csrc/hopper/linear_whole.cu, whose CTAs hold their whole share of K."""

    blocks: int  # of K, of a CTA
    ctas: int  # that share a tile: as many as the matrix has segments

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: barriers, weights, activations, sums that arrive."""
        sums = WHOLE_ROWS * (_PANEL + 4 * self.ctas) * 4
        ring = self.blocks * (_PANEL + WHOLE_ROWS) * 128
        return _ALIGN_BYTES + _BARRIER_BYTES + ring + sums


WHOLE: Final = (WholeKernel(8, 4), WholeKernel(16, 2))
"""Those that are compiled: for K = 2048 in 4 and in 2 segments."""


@cache
def whole(weight_rows: int, k: int) -> WholeKernel | None:
    """The kernel that multiplies up to WHOLE_ROWS rows by a matrix of which each CTA holds its
    share, None where there is none: bits as those of `choose`."""
    segments = num_segments(weight_rows, k)
    kernel = WholeKernel(k // BLOCK_K // segments, segments)
    fits = weight_rows % _PANEL == 0 and k == kernel.blocks * segments * BLOCK_K
    return kernel if fits and kernel in WHOLE else None


def parse(name: str, segments: int) -> LinearKernel:
    """A kernel from its short name in the table, for a matrix with that many segments of K."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    prefix, *numbers, even, late, runs = found.groups()
    rows, groups, stages_w, stages_x, own = (int(part or 0) for part in numbers)
    own, teams = own or 1, {"": 0, "t": 1, "p": 2}[prefix]
    return LinearKernel(
        rows, groups, stages_w, stages_x or stages_w, own, segments // own, teams, bool(even),
        bool(late), (_TURNS_RUN if teams else _RUN) if runs else 1,
    )  # fmt: skip
