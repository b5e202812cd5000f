"""Times absorb, attend and expand of many layers in one graph, beside torch with cuBLAS.

One graph for each pair of heads and rows serves all contexts, as in the daemon: lengths are staged.
Every layer has its own weights and its own slice of the slab, and pages are drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from latentd.bench import floors, timing
from latentd.bench.attention_torch import torch_us
from latentd.bench.gpu import CUDA, free_bytes
from latentd.bench.report import Column
from latentd.options import StartError
from latentd_kernels.attention import allocate_workspace, workspace_bytes
from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROW_DIM, num_pages
from latentd_kernels.ops import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd.bench.gpu import Gpu
    from latentd.bench.report import Report
    from latentd_kernels import driver
    from latentd_kernels.ops import Numerics

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
_FILL_PAGES: Final = 512


@dataclass(frozen=True)
class Plan:
    """What to measure: (heads, rows, context) cases, and what holds for all of them."""

    cases: Sequence[tuple[int, int, int]]
    layers: int
    max_ctx: int
    nope_dim: int
    v_dim: int
    numerics: Numerics
    parts: bool  # also each of the three alone
    rival: bool

    @property
    def pages(self) -> int:
        """Pages of the largest case, none of them shared."""
        return max(rows * num_pages(context) for _, rows, context in self.cases)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.layers * PAGE_SIZE * ROW_DIM * 2

    def fixed_bytes(self) -> int:
        """Device memory beside the slab, at most: weights, workspace, and the rival's scores."""
        most = 0
        for heads, rows, context in self.cases:
            weights = self.layers * heads * (self.nope_dim + self.v_dim) * LATENT_DIM * 6
            scores = 4 * rows * heads * context * 4 if self.rival else 0
            space = workspace_bytes(rows, self.max_ctx, heads, self.numerics)
            most = max(most, weights + scores + space)
        return most


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
        self.workspace = allocate_workspace(rows, plan.max_ctx, heads, plan.numerics, CUDA)

    def set_context(self, context: int) -> None:
        """Stage rows of this length, on pages in random order; a small slab repeats them."""
        table, pages = self.ops.inputs.block_table, num_pages(context)
        table.fill_(-1)
        order = torch.randperm(len(self.slab), device=CUDA, dtype=torch.int32)
        seats = torch.arange(self.rows * pages, device=CUDA) % len(order)
        table[: self.rows, :pages] = order[seats].view(self.rows, pages)
        entry = self.ops.ring.entry(0)
        entry.clear(len(entry.slot_idx))
        entry.slot_idx[: self.rows] = range(self.rows)
        entry.context_len[: self.rows] = context
        self.ops.stage(self.rows)  # nothing publishes, so entry 0 stays the next one
        torch.cuda.synchronize()

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Launch these parts of every layer."""
        plan, rows = self.plan, self.rows
        for layer, kv_b in enumerate(self.kv_b):
            if "absorb" in parts:
                self.ops.absorb(self.q, kv_b, self.rope, self.q_abs, rows, plan.nope_dim)
            if "attend" in parts:
                self.ops.attend(self.q_abs, self.slab, layer, self.workspace, 0, rows, SCALE)
            if "expand" in parts:
                self.ops.expand(self.workspace, kv_b, self.out, 0, rows, plan.nope_dim)

    def graphs(self) -> dict[str, driver.Graph]:
        """The graph of all parts, and, if asked for, of each alone; captured at length 1."""
        self.set_context(1)
        self.run()
        graphs = {"time_us": timing.capture(self.run, self.gpu.stream)}
        for part in PARTS if self.plan.parts else ():
            graphs[f"{part}_us"] = timing.capture(partial(self.run, (part,)), self.gpu.stream)
        return graphs


def measure(gpu: Gpu, plan: Plan, report: Report) -> None:
    """Print a line for every case, microseconds a layer."""
    slab = _slab(plan, report)
    columns = list(COLUMNS)
    if plan.parts:
        columns += [Column(f"{part}_us", part, 2) for part in PARTS]
    about = f"attention block, {plan.numerics}, a layer of {plan.layers} in one graph"
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
            rival = torch_us(layers, context) if plan.rival else None
            num_bytes = floors.attention_bytes(heads, plan.nope_dim, plan.v_dim, rows, context)
            row = floors.figures(num_bytes, times["time_us"], gpu.bandwidth, rival)
            report.add(heads=heads, rows=rows, context=context, **(row | times))
        for graph in graphs.values():
            graph.close()
        del layers
        torch.cuda.empty_cache()


def _slab(plan: Plan, report: Report) -> Tensor:
    """A slab of random values: large enough for every case, or as large as fits."""
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
