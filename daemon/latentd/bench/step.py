"""Times whole decode steps of an engine's captured graphs at chosen rows and contexts.

Nothing is prefilled: block table, lengths and a slab of random values are put in place, and the
same step is replayed. Its floor counts the experts that its rows really choose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from latentd.backend_cuda import CudaBackend
from latentd.bench import floors
from latentd.bench.report import Column
from latentd.bench.step_choices import count_visits
from latentd.operations import SamplingParams
from latentd.plans import StepPlan
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.bench.gpu import Bandwidth
    from latentd.bench.report import Report
    from latentd.engine import Engine

COLUMNS: Final = (
    Column("rows", "rows", width=6),
    Column("context", "context"),
    Column("experts", "experts"),
    Column("time_us", "device us", 1, 11),
    Column("host_us", "host us", 1),
    Column("mb", "MB", 0),
    Column("floor_us", "floor us", 1, 10),
    Column("of_copy", "% of copy", 1, 11),
    Column("of_read", "% of read", 1, 11),
    Column("tokens_per_s", "tokens/s", 0, 10),
)
EAGER_COLUMNS: Final = (
    Column("rows", "rows", width=6),
    Column("context", "context"),
    Column("graph_us", "graph us", 1, 10),
    Column("captured_long_us", "captured long us", 1, 18),
    Column("graph_over_long", "graph/long", 3, 12),
    Column("eager_us", "eager us", 1, 10),
    Column("queued_us", "queued us", 1, 11),
    Column("queued_over_graph", "queued/graph", 3, 14),
)
_WARM_UP: Final = 3
_CYCLES_PER_US: Final = 2000  # of a GPU at 2 GHz; at a lower clock the wait is longer
_FILL_PAGES: Final = 256


@dataclass(frozen=True)
class StepTime:
    """Medians in microseconds: the device's own clock from the graph's first node to its last,
    and the host's from before the launch to the sight of the step number."""

    device_us: float
    host_us: float


class Steps:
    """An engine whose slots are free, and the step that is in place."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.backend, CudaBackend)
        self.engine = engine
        self.backend: CudaBackend = engine.backend
        self.buffers = engine.backend.runner.buffers
        slab = self.buffers.slab
        for first in range(0, len(slab), _FILL_PAGES):
            slab[first : first + _FILL_PAGES].normal_()
        self.generator = torch.Generator().manual_seed(0)
        self.plan = StepPlan(0, [], [], [], [], [], [])
        self.bucket = 1

    def place(self, rows: int, context: int) -> None:
        """Seat `rows` rows whose step appends token number `context`. Each has a page of its own
        for it; the other pages come in random order and repeat when the pool is too small."""
        table, full = self.buffers.inputs.block_table, num_pages(context) - 1
        slab = self.buffers.slab
        others = torch.randperm(len(slab) - rows, generator=self.generator, dtype=torch.int32)
        seats = torch.arange(rows * full) % max(1, len(others))
        table.fill_(-1)
        table[:rows, :full] = (others + rows)[seats].view(rows, full).to(table.device)
        table[:rows, full] = torch.arange(rows, dtype=torch.int32, device=table.device)
        torch.cuda.synchronize()
        vocab, page_rows = self.engine.info.vocab_size, slab.shape[1] * PAGE_SIZE
        tokens = torch.randint(vocab, (rows,), generator=self.generator).tolist()
        kv_row = [row * page_rows + (context - 1) % PAGE_SIZE for row in range(rows)]
        greedy = [SamplingParams(seed=0)] * rows
        self.plan = StepPlan(rows, [], tokens, list(range(rows)), [context] * rows, kv_row, greedy)
        self.bucket = min(size for size in self.engine.info.buckets if size >= rows)

    def shares_pages(self, rows: int, context: int) -> bool:
        """Whether rows of that length must share pages."""
        return rows * num_pages(context) > len(self.buffers.slab)

    def once(self) -> StepTime:
        """Run the step that is in place, and wait for it."""
        start_s = time.perf_counter()
        self.backend.launch(self.plan, self.bucket)
        outputs = self.backend.wait()
        return StepTime(outputs.device_us, (time.perf_counter() - start_s) * 1e6)

    def time(self, steps: int, eager: bool = False, behind_us: float = 0.0) -> StepTime:
        """Medians over `steps` runs, after a few that do not count. Each run begins on the device
        after `behind_us`, in which the host can put all launches into the stream."""
        self.backend.eager = eager
        stream = torch.cuda.ExternalStream(self.backend.stream)  # type: ignore[no-untyped-call]
        times = []
        try:
            for _ in range(_WARM_UP + steps):
                if behind_us:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(int(behind_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
                times.append(self.once())
        finally:
            self.backend.eager = False
        del times[:_WARM_UP]
        return StepTime(
            median(once.device_us for once in times), median(once.host_us for once in times)
        )


def measure(
    steps: Steps, rows: Sequence[int], contexts: Sequence[int], repeats: int,
    bandwidth: Bandwidth, report: Report,
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Print a line for every pair of rows and context; returns the device's microseconds."""
    config = steps.backend.runner.model.config
    report.table("step", "decode steps, graph replay", COLUMNS)
    shared, device_us = [], {}
    for num in rows:
        for context in contexts:
            steps.place(num, context)
            visits = count_visits(steps)
            times = steps.time(repeats)
            device_us[num, context] = times.device_us
            num_bytes = floors.step_bytes(config, num, context, visits)
            row = floors.figures(num_bytes, times.device_us, bandwidth, None)
            report.add(
                rows=num, context=context, experts=visits, host_us=times.host_us,
                tokens_per_s=num / times.host_us * 1e6, **row,
            )  # fmt: skip
            if steps.shares_pages(num, context):
                shared.append(f"{num} rows at {context}")
    if shared:
        pool = len(steps.buffers.slab)
        report.note(f"pages are shared by {', '.join(shared)}: the pool has {pool} pages")
    return device_us


def compare_eager(steps: Steps, context: int, repeats: int, report: Report) -> None:
    """Print what one row takes by the device's clock: with the engine's graph, captured when no
    row was there; with one captured behind a step of this length, which is what serving all lengths
    by one graph costs; and without a graph, as the host makes the launches, and with all of them in
    the stream before the first one starts, where each hand-off takes longer than in a graph."""
    about = "one row, a graph's replay against the same launches without one (queued: all in time)"
    report.table("eager", about, EAGER_COLUMNS)
    steps.place(1, context)
    graph, eager = steps.time(repeats), steps.time(repeats, eager=True)
    queued = steps.time(repeats, eager=True, behind_us=2 * eager.host_us)
    steps.backend.capture([steps.bucket])
    captured_long = steps.time(repeats)
    report.add(
        rows=1, context=context, graph_us=graph.device_us, eager_us=eager.device_us,
        captured_long_us=captured_long.device_us, queued_us=queued.device_us,
        graph_over_long=graph.device_us / captured_long.device_us,
        queued_over_graph=queued.device_us / graph.device_us,
    )  # fmt: skip
