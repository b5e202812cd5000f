"""The four kernel benchmarks, from their arguments to a report; they need torch and a GPU."""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.bench import shapes
from latentd.bench.report import Report
from latentd.commands.bench_arguments import attention_cases, step_contexts
from latentd.commands.parsing import require_daemon
from latentd.options import EngineOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


@contextmanager
def _reporting(args: argparse.Namespace) -> Iterator[Report]:
    """A report that is closed if nothing failed; a failed device ends the process."""
    from latentd.leaving import leaving_on_device_fault  # needs the bindings

    report = Report(sys.stdout, args.json)
    with leaving_on_device_fault():
        yield report
    report.close()


def attention(args: argparse.Namespace) -> int:
    """Measure the attention block."""
    cases = attention_cases(args)
    require_daemon("bench attention")
    from latentd.bench import attention as bench  # these need torch
    from latentd.bench.attention_plan import Plan
    from latentd.bench.gpu import open_gpu

    nope_dim, v_dim = args.widths
    layers = args.layers or (shapes.CHUNK_LAYERS if args.chunk else shapes.ATTENTION_LAYERS)
    plan = Plan(
        cases, layers, args.max_ctx, nope_dim, v_dim, args.numerics, args.chunk, args.parts,
        not args.no_torch, args.cuts,
    )  # fmt: skip
    with _reporting(args) as report:
        bench.measure(open_gpu(report), plan, report)
    return 0


def linear(args: argparse.Namespace) -> int:
    """Measure linear layers."""
    require_daemon("bench linear")
    from latentd.bench import linear as bench  # these need torch
    from latentd.bench.gpu import open_gpu
    from latentd.bench.presets import read_config

    matrices = [shapes.Matrix("-", features, k, "bf16") for features, k in args.shape]
    for name in args.config or ([] if args.shape else ["v2-lite", "v3", "kimi-k2"]):
        matrices += shapes.matrices(read_config(name))
    unique = list(dict.fromkeys(matrices))
    with _reporting(args) as report:
        bench.measure(open_gpu(report), unique, args.rows, not args.no_torch, report)
    return 0


def moe(args: argparse.Namespace) -> int:
    """Measure the experts of a MoE layer."""
    require_daemon("bench moe")
    from latentd.bench import moe as bench  # these need torch
    from latentd.bench.gpu import open_gpu
    from latentd.bench.presets import read_config

    config = read_config(args.config)
    with _reporting(args) as report:
        gpu = open_gpu(report)
        report.facts(config=args.config, layers=args.layers)
        bench.measure(gpu, config, args.layers, args.rows, not args.no_torch, report)
    return 0


def step(args: argparse.Namespace) -> int:
    """Measure whole decode steps."""
    contexts = step_contexts(args)
    require_daemon("bench step")
    from latentd.bench import step as bench  # these need torch
    from latentd.bench import step_invariance
    from latentd.bench.gpu import open_gpu
    from latentd.bench.presets import write_config
    from latentd.bench.step_start import start_steps

    with tempfile.TemporaryDirectory() as folder, _reporting(args) as report:
        if args.model is None:
            write_config(Path(folder), args.config, args.layers)
        options = EngineOptions(
            args.model or Path(folder), weights="checkpoint" if args.model else "random",
            device="cuda", numerics=args.numerics, max_ctx=args.max_ctx, max_slots=max(args.rows),
            selftest=False,
        )  # fmt: skip
        gpu = open_gpu(report)
        report.facts(model=str(args.model or args.config), numerics=args.numerics)
        steps = start_steps(options, args.rows, contexts, report)
        times = bench.measure(steps, args.rows, contexts, args.steps, gpu.bandwidth, report)
        bench.compare_eager(steps, args.max_ctx, args.steps, report)
        if not args.no_torch:
            step_invariance.measure(steps, gpu, times, report)
    return 0
