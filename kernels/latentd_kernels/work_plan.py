"""How a step's attention is dealt to a fixed grid of CTAs, in plain integers: what `stage` computes
on the device (csrc/work_plan.cuh), and the sizes that follow from it.

Where a CTA's share begins depends on the whole batch. What is computed for a row does not: its
splits follow from its length, splits fold into chains (`chain_splits`) and chains into the row in
one order, whoever does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from latentd_kernels import head_tiles
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.geometry import PAGE_SIZE, num_pages, work_pages_per_split
from latentd_kernels.row_tiles import row_tile, tile_rows

if TYPE_CHECKING:
    from latentd_kernels.ops import StepInputs

MAX_CTAS: Final = 144
"""Most CTAs of a grid: the SMs of a full GH100."""
ROW_WORDS: Final = 8
"""int32 words of a RowPlan."""
WORK_WORDS: Final = 12
"""int32 words of a Work."""


class RowPlan(NamedTuple):
    """What attention must know of a batch row; the fields of work_plan.cuh's RowPlan."""

    context_len: int
    slot: int
    pages_per_split: int
    num_splits: int
    first_node: int
    splits_per_node: int
    old_pages: int
    tile_rows: int = 1


class Work(NamedTuple):
    """A CTA's share: splits of (row, head group) and of what follows; `plan` is the row's."""

    row: int
    head_group: int
    head_tile: int
    first_split: int
    num_splits: int
    plan: RowPlan


def chain_splits(per_split: int, heads: int) -> int:
    """Neighbouring splits of so many pages that fold into one chain (work_plan.cuh, chain_splits).
    With many heads a node is large and a batch has work enough for every CTA without short ones;
    but chains of a short row are short, so that a few such rows have enough of them."""
    return 8 if heads >= head_tiles.ANY_HEADS and per_split == 2 else 4


def num_calls(rows: int) -> int:
    """Attend calls of a step of `rows` rows: each takes MAX_CALL_ROWS, the last what is left."""
    return -(-rows // MAX_CALL_ROWS)


def max_nodes(rows: int, max_ctx: int, heads: int) -> int:
    """Most nodes (chains, or single splits of few chains) of one attend call of `rows` rows.

    128 rows of 65,536 tokens make 8192 with up to 63 heads and 4096 from 64 on; a node takes 1032
    bytes a head: 129 MiB with 16 heads, 516 MiB with 128.
    """
    most = num_pages(max_ctx)
    steps = [pages for pages in (16, 64, 128, 256, *(1024 << k for k in range(5))) if pages < most]
    found = []
    for pages in (*steps, most):
        per_split = work_pages_per_split(pages, heads)
        splits, chain = -(-pages // per_split), chain_splits(per_split, heads)
        found.append(
            max(rows * -(-splits // chain), min(rows * splits, chain * head_tiles.MIN_CHAINS))
        )
    return max(found)


class CallPlan:
    """The plan of one attend call for `num_shares` shares: rows of the given lengths in a step of
    `step_rows` rows, with `chunk` consecutive tokens of one slot.

    `per_split` pages a split replace the rule where a benchmark asks what the rule costs.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        slots: Sequence[int],
        heads: int,
        step_rows: int,
        num_shares: int,
        per_split: int | None = None,
        chunk: bool = False,
    ) -> None:
        self.num_shares = num_shares
        self.lengths, self.slots, self.heads, self.step_rows = lengths, slots, heads, step_rows
        pages = [num_pages(length) for length in lengths]
        self.per_split = [per_split or work_pages_per_split(count, heads) for count in pages]
        splits = [-(-count // per) for count, per in zip(pages, self.per_split, strict=True)]
        self.chain = [chain_splits(per, heads) for per in self.per_split]
        chains = [-(-count // most) for count, most in zip(splits, self.chain, strict=True)]
        # What is dealt, a tile's once.
        self.tile_rows = tile_rows(lengths, row_tile(heads, len(lengths)) if chunk else 1)
        self.pages = [0, *accumulate(self._dealt(pages))]
        self.splits = [0, *accumulate(self._dealt(splits))]
        self.head_tile = head_tiles.head_tile(
            heads, self.splits[-1], sum(chains), self.pages[-1], num_shares
        )
        self.head_groups = -(-heads // self.head_tile)
        groups = self.head_groups * head_tiles.share_ctas(self.head_tile)
        self.is_chained = sum(chains) * groups >= head_tiles.MIN_CHAINS
        self.row_splits = splits
        self.nodes = [0, *accumulate(chains if self.is_chained else splits)]

    def row(self, row: int) -> RowPlan:
        """The plan of a row; rows count from the call's first."""
        length = self.lengths[row]
        return RowPlan(
            context_len=length,
            slot=self.slots[row],
            pages_per_split=self.per_split[row],
            num_splits=self.row_splits[row],
            first_node=self.nodes[row],
            splits_per_node=self._node_splits(row),
            old_pages=max(0, length - self.step_rows) // PAGE_SIZE,
            tile_rows=self.tile_rows[row],
        )

    def work(self, share: int) -> Work:
        """One of the shares, cut at equal cost (a page 4, a node 2)."""
        group, row, split, first = self._place(share)
        num = self._place(share + 1)[3] - first
        if num == 0:
            return Work(0, 0, 0, 0, 0, self.row(0))
        while split >= self._dealt_splits(row):
            split, row = 0, row + 1
            if row == len(self.lengths):
                group, row = group + 1, 0
        return Work(row, group, self.head_tile, split, num, self.row(row))

    def _dealt(self, counts: Sequence[int]) -> list[int]:
        return [count if num else 0 for count, num in zip(counts, self.tile_rows, strict=True)]

    def _dealt_splits(self, row: int) -> int:
        return self.splits[row + 1] - self.splits[row]

    def _node_splits(self, row: int) -> int:
        return self.chain[row] if self.is_chained else 1

    def _cost(self, row: int) -> int:
        return 4 * self.pages[row] + 2 * self.nodes[row]

    def _place(self, share: int) -> tuple[int, int, int, int]:
        """Head group, row, split and index of the first node at or after a share of the cost."""
        total, num_splits = self._cost(len(self.lengths)), self.splits[-1]
        if share >= self.num_shares or total == 0:
            return self.head_groups, 0, 0, self.head_groups * num_splits
        group, rest = divmod(total * self.head_groups * share // self.num_shares, total)
        row = max(r for r in range(len(self.lengths)) if self._cost(r) <= rest)
        node_splits = self._node_splits(row)
        nodes = -(-(rest - self._cost(row)) // (4 * self.per_split[row] * node_splits + 2))
        split = min(nodes * node_splits, self._dealt_splits(row))
        return group, row, split, group * num_splits + self.splits[row] + split


def fill_plan(
    inputs: StepInputs,
    lengths: Sequence[int],
    slots: Sequence[int],
    heads: int,
    num_ctas: int,
    per_split: int | None = None,
    chunk: bool = False,
) -> None:
    """Write row_plan and work of a step as `stage` does, for tests and benchmarks that stage
    nothing; with `per_split` as it never does, see CallPlan."""
    rows = len(lengths)
    shares = head_tiles.num_shares(heads, num_ctas)
    for call in range(num_calls(rows)):
        part = slice(call * MAX_CALL_ROWS, min(rows, (call + 1) * MAX_CALL_ROWS))
        plan = CallPlan(lengths[part], slots[part], heads, rows, shares, per_split, chunk)
        inputs.row_plan[part] = _words([plan.row(row) for row in range(len(lengths[part]))])
        work = [plan.work(share) for share in range(shares)]
        inputs.work[call * shares : (call + 1) * shares] = _words(
            [(x.row, x.head_group | x.head_tile << 16, *x[3:5], *x.plan) for x in work]
        )


def _words(structs: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(structs, dtype=torch.int32)
