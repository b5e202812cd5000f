"""`latentd bench`: its parts, and `steps`, what a step of a running daemon costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.commands import bench_attend, bench_kernels
from latentd.commands.bench_cases import ROWS, add_case_flags, print_json
from latentd.commands.latency import WARM_UP, Case, Measured, measure
from latentd.commands.parsing import Parser, add_command
from latentd.engine_figures import RING_STEPS
from latentd_client import Client, DaemonInfo

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command and its parts."""
    about = "measure a running daemon, or the kernels on this GPU"
    bench = subparsers.add_parser("bench", help=about, description=about, allow_abbrev=False)
    bench.set_defaults(parser=bench)
    parts = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    parser = add_command(
        parts, "steps", "latency and throughput of steps: one slot, several in one request, "
        "several clients, streams", run,
    )  # fmt: skip
    parser.epilog = (
        f"device: median of the device's own times of the bucket's last {RING_STEPS} steps, "
        "- where a case is too short to have run them all; over it: what the "
        "median request of those same steps took beyond device."
    )
    add_case_flags(parser, 1024, "requests")
    bench_attend.add(parts)
    bench_kernels.add(parts)


def run(args: argparse.Namespace) -> int:
    """Measure case by case, printing each as it is done."""
    with Client(args.endpoint, timeout_s=args.timeout_s) as client:
        info = client.info
    if args.context + WARM_UP >= info.max_ctx:
        args.parser.error(f"--context {args.context}: at most {info.max_ctx - WARM_UP - 1} here")
    results = (measure(args.endpoint, case) for case in cases(info, args))
    if args.json:
        print_json(info, args.context, results)
    else:
        print(f"{info.model} on {info.device}, {info.numerics}, {args.context} tokens at the start")
        print_table(results)
    return 0


def cases(info: DaemonInfo, args: argparse.Namespace) -> Iterator[Case]:
    """The cases that this daemon has slots for."""
    for rows in ROWS:
        if rows <= info.max_slots:
            yield Case("step", rows, 1, args.context, args.steps, args.seconds)
    for clients in (2, 4):
        if clients <= info.max_slots:
            yield Case("step", 1, clients, args.context, args.steps, args.seconds)
    for clients in (1, 2, 4):
        if clients <= info.max_slots:
            yield Case("stream", 1, clients, args.context, args.steps, args.seconds)


def print_table(results: Iterable[Measured]) -> None:
    """One line a case; printed as the cases end."""
    print(
        f"{'case':32}{'requests':>9}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}"
        f"{'device us':>11}{'over it us':>12}{'tokens/s':>11}"
    )
    for row in results:
        device = "-" if row.device_us is None else f"{row.device_us:.1f}"
        over = "-" if row.over_device_us is None else f"{row.over_device_us:.1f}"
        print(
            f"{row.case:32}{row.requests:>9}{row.p50_us:>10.1f}{row.p90_us:>10.1f}"
            f"{row.p99_us:>10.1f}{device:>11}{over:>12}{row.tokens_per_s:>11.0f}",
            flush=True,
        )
