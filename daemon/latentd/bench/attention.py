"""Times absorb, attend and expand of many layers in one graph, beside torch with cuBLAS.

One graph for each pair of heads and rows serves all contexts, as in the daemon: lengths are staged.
Every layer has its own weights and its own slice of the slab, and pages are drawn at random.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from latentd.bench import floors, timing
from latentd.bench.attention_plan import allocate_slab
from latentd.bench.attention_splits import best_cut
from latentd.bench.attention_torch import expanded_us, torch_us
from latentd.bench.gpu import CUDA
from latentd.bench.report import Column
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.geometry import LATENT_DIM, ROW_DIM, num_pages
from latentd_kernels.ops import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd.bench.attention_plan import Plan
    from latentd.bench.gpu import Gpu
    from latentd.bench.report import Report
    from latentd_kernels import driver

SCALE: Final = 0.1352337788  # DeepSeek-V3's
PARTS: Final = ("absorb", "attend", "expand")
COLUMNS: Final = (
    Column("heads", "heads", width=6),
    Column("rows", "rows", width=5),
    Column("context", "context"),
    Column("time_us", "us", 2),
    Column("mb", "MB", 1),
    Column("floor_us", "floor us", 2, 10),
    Column("of_copy", "% of copy", 0, 11),
    Column("of_read", "% of read", 0, 11),
    Column("torch_us", "torch us", 1, 10),
    Column("speedup", "speed-up", 2, 10),
)


class Layers:
    """Buffers of one pair of heads and rows, and graphs over them."""

    def __init__(self, gpu: Gpu, plan: Plan, slab: Tensor, heads: int, rows: int) -> None:
        self.gpu, self.plan, self.slab, self.heads, self.rows = gpu, plan, slab, heads, rows
        self.ops = gpu.make_ops(plan.numerics, rows, num_pages(plan.max_ctx))
        width = plan.nope_dim + plan.v_dim
        self.kv_b = torch.empty(
            plan.layers, heads * width, LATENT_DIM, dtype=torch.bfloat16, device=CUDA
        )
        for layer in self.kv_b:
            layer.normal_(0.0, 1 / 16)
        self.q = torch.randn(rows, heads * (plan.nope_dim + 64), device=CUDA).bfloat16()
        self.q_abs = torch.empty(rows, heads, ROW_DIM, dtype=torch.bfloat16, device=CUDA)
        self.out = torch.empty(rows, heads * plan.v_dim, dtype=torch.bfloat16, device=CUDA)
        self.rope = Rope(torch.rand(32, device=CUDA), 1.0, True)
        self.shares_pages = plan.chunk  # as the rows of a prompt chunk do
        together = min(rows, MAX_CALL_ROWS)
        self.workspace = allocate_workspace(together, plan.max_ctx, heads, plan.numerics, CUDA)

    def set_context(self, context: int) -> None:
        """Stage rows of this length (a chunk: up to it), on pages in random order; a small slab
        repeats them."""
        table, rows, pages = self.ops.inputs.block_table, self.rows, num_pages(context)
        sequences = self.plan.sequences(rows)
        table.fill_(-1)
        order = torch.randperm(len(self.slab), device=CUDA, dtype=torch.int32)
        seats = torch.arange(sequences * pages, device=CUDA) % len(order)
        table[:sequences, :pages] = order[seats].view(sequences, pages)
        entry = self.ops.ring.entry(0)
        entry.clear(len(entry.slot_idx))
        is_chunk = self.plan.chunk
        entry.slot_idx[:rows] = 0 if is_chunk else range(rows)
        entry.context_len[:rows] = range(context - rows + 1, context + 1) if is_chunk else context
        # Nothing publishes, so entry 0 stays the next one.
        self.ops.stage(rows, self.heads, self.shares_pages)
        torch.cuda.synchronize()

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Launch these parts of every layer, as the model's forward does."""
        ops, rows, nope_dim, shares = self.ops, self.rows, self.plan.nope_dim, self.shares_pages
        for layer, kv_b in enumerate(self.kv_b):
            if "absorb" in parts:
                ops.absorb(self.q, kv_b, self.rope, self.q_abs, rows, nope_dim)
            for first in range(0, rows, MAX_CALL_ROWS):
                count = min(MAX_CALL_ROWS, rows - first)
                if "attend" in parts:
                    ops.attend(
                        self.q_abs, self.slab, layer, self.workspace, first, count, SCALE, shares
                    )
                if "expand" in parts:
                    ops.expand(self.workspace, kv_b, self.out, first, count, nope_dim)

    def graphs(self) -> dict[str, driver.Graph]:
        """The graph of all parts and, if asked for, of each; captured at the least length."""
        self.set_context(self.rows if self.plan.chunk else 1)
        self.run()
        graphs = {"time_us": timing.capture(self.run, self.gpu.stream)}
        for part in PARTS if self.plan.parts else ():
            graphs[f"{part}_us"] = timing.capture(partial(self.run, (part,)), self.gpu.stream)
        return graphs

    def alone_us(self, context: int) -> float:
        """Microseconds a layer of a chunk whose rows are attended as decode steps attend them."""
        self.shares_pages = False
        self.set_context(context)
        self.run()
        graph = timing.capture(self.run, self.gpu.stream)
        time_us = timing.replay_us(graph, self.gpu.stream) / self.plan.layers
        graph.close()
        self.shares_pages = True
        self.set_context(context)
        return time_us


def measure(gpu: Gpu, plan: Plan, report: Report) -> None:
    """Print a line for every case, microseconds a layer."""
    slab = allocate_slab(plan, report)
    columns = list(COLUMNS)
    if plan.parts:
        columns += [Column(f"{part}_us", part, 2) for part in PARTS]
    if plan.chunk:
        columns.append(Column("decode_us", "as decode us", 1, 13))
    if plan.cuts:
        columns += [Column("best_us", "best cut us", 2, 13), Column("best_pages", "pages", 0, 7)]
    what = "a prompt's last rows" if plan.chunk else "decode rows"
    about = f"attention block, {what}, {plan.numerics}, a layer of {plan.layers} in one graph"
    report.table("attention", about, columns)
    for heads, rows in dict.fromkeys((heads, rows) for heads, rows, _ in plan.cases):
        layers = Layers(gpu, plan, slab, heads, rows)
        graphs = layers.graphs()
        for context in (c for h, r, c in plan.cases if (h, r) == (heads, rows)):
            layers.set_context(context)
            times = {
                key: timing.replay_us(graph, gpu.stream) / plan.layers
                for key, graph in graphs.items()
            }
            rival_us = expanded_us if plan.chunk else torch_us
            rival = rival_us(layers, context) if plan.rival else None
            num_bytes = floors.attention_bytes(
                heads, plan.nope_dim, plan.v_dim, plan.sequences(rows), context
            )
            row = floors.figures(num_bytes, times["time_us"], gpu.bandwidth, rival)
            best = best_cut(layers, graphs["time_us"], context) if plan.cuts else None
            if best is not None:
                row |= {"best_pages": best[0], "best_us": best[1]}
            if plan.chunk:
                row["decode_us"] = layers.alone_us(context)
            report.add(heads=heads, rows=rows, context=context, **(row | times))
        for graph in graphs.values():
            graph.close()
        del layers
        torch.cuda.empty_cache()
