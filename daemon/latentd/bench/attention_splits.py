"""What the fixed cut of contexts costs: the same kernels with the best pages a split for a batch.

The kernels that follow a work list read from it how many pages make a split, so that a list of
another cut can be put in the place of the one that `stage` made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from latentd.bench import timing
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.geometry import MAX_SPLITS, num_pages
from latentd_kernels.head_tiles import num_shares
from latentd_kernels.work_plan import CallPlan, fill_plan

if TYPE_CHECKING:
    from latentd.bench.attention import Layers
    from latentd_kernels import driver

CUTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Pages a split that are tried."""


def best_cut(layers: Layers, graph: driver.Graph, context: int) -> tuple[int, float] | None:
    """The fastest number of pages a split for these rows, and the microseconds a layer with it;
    None where the kernels cut by themselves. The rule's own list is staged again at the end."""
    if not layers.ops.plans_work:
        return None
    found = []
    for pages in CUTS:
        if put_cut(layers, context, pages):
            torch.cuda.synchronize()
            time_us = timing.replay_us(graph, layers.gpu.stream) / layers.plan.layers
            found.append((time_us, pages))
    layers.set_context(context)
    if not found:
        return None
    time_us, pages = min(found)
    return pages, time_us


def put_cut(layers: Layers, context: int, pages: int) -> bool:
    """Put a list of this cut in place, if a row may have that many splits and the workspace holds
    them."""
    rows, heads, ops = layers.rows, layers.heads, layers.ops
    if num_pages(context) > pages * MAX_SPLITS:
        return False
    call_rows = min(rows, MAX_CALL_ROWS)
    shares = num_shares(heads, ops.num_ctas)
    call = CallPlan([context] * call_rows, list(range(call_rows)), heads, rows, shares, pages)
    if call.nodes[-1] > layers.workspace.partial_o.shape[0]:
        return False
    fill_plan(ops.inputs, [context] * rows, list(range(rows)), heads, ops.num_ctas, pages)
    return True
