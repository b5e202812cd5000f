"""Many client processes at one daemon, each with a mix of opens, steps, streams, forks and closes.

    python tests/bench/bench_load.py [--device cuda|cpu] [--model demo|v2-lite] [--clients 64]
        [--seconds 300] [--slack 0.2] [--screens FOLDER]

Prints the clients' times by operation, their rates, what the daemon holds before and after, and its
own figures in the middle (`--screens`: pictures of them too). Ends with 1 when anything was refused
or lost, when a text had other bits than another time or in another client, when the slowest client
was further below the mean than `--slack`, or when something has not come back.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from judging import judged
from latentd.commands.child import Child
from latentd_client import Control
from latentd_client.protocol import control_endpoint
from load_clients import Work
from loading import differing, load, show
from process_figures import Figures, figures, grown
from timed_streams import MODELS
from watching import scrape, screen

GROWTH_KB: Final = 16384
"""At most, of the daemon's resident memory from the first quarter of the time to its end."""


def main() -> None:
    """Start a daemon, load it, and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="demo", choices=MODELS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--slack", type=float, default=0.2)
    parser.add_argument("--screens", type=Path)
    args = parser.parse_args()
    print(f"{args.model}, {args.clients} clients, {args.seconds:g} s; gpu {gpu()}")
    flags = ["--device", args.device, "--max-slots", "128", "--max-ctx", "1024"]
    misses = judged(args.model, flags, lambda daemon: run(daemon, args))
    print("gpu, the daemon gone:", gpu())
    print("misses:", misses or "none")
    sys.exit(bool(misses))


def run(daemon: Child, args: argparse.Namespace) -> list[str]:
    """The clients' time, and what is wrong after it."""
    pid, seen = daemon.process.pid, list[Figures]()

    def look() -> None:
        seen.append(figures(pid))
        print(f"after {len(seen)} quarters: {seen[-1]}; gpu {gpu()}", flush=True)
        if len(seen) == 2:
            print(
                screen(daemon.endpoint, args.screens),
                scrape(daemon.endpoint),
                sep="\n\n",
                flush=True,
            )

    print(f"the daemon when ready: {figures(pid)}", flush=True)
    works = load(daemon.endpoint, args.clients, args.seconds, args.seconds / 4, look)
    show(works)
    return [*unfair(works, args.slack), *differing(works), *left(daemon, seen[0])]


def unfair(works: Sequence[Work], slack: float) -> list[str]:
    """The clients' rates, and whether the slowest is too far below the mean."""
    rates = np.array([work.tokens / work.elapsed_s for work in works])
    share = float(rates.min() / rates.mean())
    print(f"\n{sum(work.rounds for work in works)} rounds, {sum(work.tokens for work in works)} "
          f"tokens, {rates.sum():.0f} tokens a second; of a client: mean {rates.mean():.1f}, "
          f"slowest {rates.min():.1f} ({share:.3f} of it), fastest {rates.max():.1f}")  # fmt: skip
    return [f"the slowest client has {share:.3f} of the mean rate"] * (share < 1 - slack)


def left(daemon: Child, early: Figures) -> list[str]:
    """What has not come back; `early` is with all clients there, and warm."""
    late = figures(daemon.process.pid)
    print(f"at the end: {late}; gpu {gpu()}")
    with Control(control_endpoint(daemon.endpoint)) as control:
        stats = control.stats()
    counts = {name: stats[name] for name in ("slots_used", "kv_pages_used", "failed", "refused")}
    print(f"afterwards: {counts}, server {stats['server']}")
    misses = [f"{name}: {count}" for name, count in counts.items() if count]
    return [*misses, *grown(early, late, GROWTH_KB)]


def gpu() -> str:
    """Card, driver and used memory, where there is one."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = "--query-gpu=name,driver_version,memory.used"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
