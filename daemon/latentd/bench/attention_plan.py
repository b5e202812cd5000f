"""What the attention benchmark measures, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from latentd.bench.gpu import CUDA, free_bytes
from latentd.options import StartError
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.attention_workspace import workspace_bytes
from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROW_DIM, num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd.bench.report import Report
    from latentd_kernels.ops import Numerics

_FILL_PAGES: Final = 512


@dataclass(frozen=True)
class Plan:
    """What to measure: (heads, rows, context) cases, and what holds for all of them.

    Rows are decode rows of one length each, or with `chunk` the last tokens of one prompt.
    """

    cases: Sequence[tuple[int, int, int]]
    layers: int
    max_ctx: int
    nope_dim: int
    v_dim: int
    numerics: Numerics
    chunk: bool
    parts: bool  # also each of the three alone
    rival: bool
    cuts: bool = False  # also with the best number of pages a split for each case

    @property
    def pages(self) -> int:
        """Pages of the largest case, none of them shared."""
        return max(self.sequences(rows) * num_pages(context) for _, rows, context in self.cases)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.layers * PAGE_SIZE * ROW_DIM * 2

    def sequences(self, rows: int) -> int:
        """How many block tables `rows` rows need."""
        return 1 if self.chunk else rows

    def fixed_bytes(self) -> int:
        """Device memory beside the slab, at most: weights, workspace, and the rival's scores, or
        for a chunk its expanded keys and values."""
        most = 0
        for heads, rows, context in self.cases:
            weights = self.layers * heads * (self.nope_dim + self.v_dim) * LATENT_DIM * 6
            rival = 16 * heads * context * (1024 if self.chunk else rows) if self.rival else 0
            space = workspace_bytes(
                min(rows, MAX_CALL_ROWS), self.max_ctx, heads, self.numerics, CUDA
            )
            most = max(most, weights + rival + space)
        return most


def allocate_slab(plan: Plan, report: Report) -> Tensor:
    """A slab of random values: large enough for every case, or as large as fits. Raises StartError
    when a single row does not fit."""
    left = int(free_bytes() * 0.95) - plan.fixed_bytes()
    pages = min(plan.pages, left // plan.page_bytes)
    if pages < max(num_pages(context) for _, _, context in plan.cases):
        raise StartError(
            f"one row needs {max(num_pages(c) for _, _, c in plan.cases)} pages, {max(pages, 0)} "
            "fit into the device's memory: measure shorter contexts or fewer layers"
        )
    report.note(
        f"slab: {pages} pages, {pages * plan.page_bytes / 2**30:.1f} GiB; everything else at most "
        f"{plan.fixed_bytes() / 2**30:.1f} GiB"
        + ("" if pages == plan.pages else f"; {plan.pages} do not fit: rows share pages")
    )
    shape = (pages, plan.layers, PAGE_SIZE, ROW_DIM)
    slab = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
    for first in range(0, pages, _FILL_PAGES):
        slab[first : first + _FILL_PAGES].normal_()
    return slab
