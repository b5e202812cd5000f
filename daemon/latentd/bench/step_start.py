"""Starts the engine whose steps are measured: the daemon's own start, with a pool for the cases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from latentd import memory
from latentd.backend import start_engine
from latentd.bench.gpu import CUDA, free_bytes
from latentd.bench.step import Steps
from latentd.model.config import ModelConfig
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.bench.report import Report
    from latentd.memory import MemoryPlan
    from latentd.options import EngineOptions

SPARE_BYTES: Final = 2 << 30
"""Left to cuBLAS and to what the comparisons allocate, where the pool takes all that fits."""


def start_steps(
    options: EngineOptions, rows: Sequence[int], contexts: Sequence[int], report: Report
) -> Steps:
    """Start the engine with as many pages as the cases need, or as fit. Raises CheckpointError,
    StartError, ManifestError, DeviceFault."""
    options = options.for_device("cuda")
    config = ModelConfig.from_dir(options.model_dir)
    needed = max(num_pages(options.max_ctx), max(rows) * num_pages(max(contexts)))
    plan = plan_pool(config, options, needed, free_bytes())
    report.note(
        f"device memory: weights {_gib(plan.weight_bytes)}, buffers and workspace "
        f"{_gib(plan.static_bytes + plan.workspace_bytes)}, pool {_gib(plan.slab_bytes)} "
        f"({plan.kv_pages} pages; all cases without sharing: {needed})"
    )
    engine = start_engine(replace(options, kv_pages=plan.kv_pages), lambda line: None)
    nodes = ", ".join(f"{bucket}: {num}" for bucket, num in engine.startup.graph_nodes.items())
    report.note(f"graphs for max_ctx {options.max_ctx}, nodes by bucket: {nodes}")
    return Steps(engine)


def plan_pool(
    config: ModelConfig, options: EngineOptions, needed: int, free_bytes: int
) -> MemoryPlan:
    """The plan of a pool of `needed` pages, or of as many as fit. Raises StartError."""
    # The engine plans again, and a pool that no longer fits would end it: hence the spare bytes.
    auto = replace(options, kv_pages="auto")
    plan = memory.plan(config, auto, CUDA, free_bytes - SPARE_BYTES)
    return replace(plan, kv_pages=min(needed, plan.kv_pages))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
