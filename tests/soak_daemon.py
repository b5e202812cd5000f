"""A whole daemon under its clients for as long as you like, and then idle; `make soak`.

    python tests/soak_daemon.py [--seconds 3600] [--device cpu] [--model tiny] [--clients 2]
        [--idle 10]

Clients open, step, stream, fork and close (load_clients.py); each text must have the same bits
every time. Prints the times as they see them, the daemon's resident memory and descriptors, and
what it uses of a processor when nobody asks anything. Ends with 1 when resident memory grows by
GROWTH_KB in 100,000 steps (or in all of a shorter run), when descriptors or threads grow, when the
idle daemon takes IDLE of a processor, or when a text had other bits.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from judging import judged
from latentd.commands.child import Child
from latentd_client import Client, Control
from latentd_client.protocol import control_endpoint
from loading import differing, load, show
from process_figures import Figures, figures, grown
from timed_streams import MODELS, touch_all_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH_KB: Final = 1024.0
PER_STEPS: Final = 100_000
IDLE: Final = 0.01
WARM_UP: Final = 0.2
"""Of the looks at the daemon, the first part that does not count."""
LOOKS: Final = 200
MAX_SLOTS, MAX_CTX = 8, 256


@dataclass(frozen=True)
class Look:
    """What the daemon holds after so many steps."""

    steps: int
    held: Figures


def main() -> None:
    """Start a daemon, let clients at it, and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--idle", type=float, default=10.0)
    args = parser.parse_args()
    flags = ["--device", args.device, "--grace-s", "5"]
    flags += ["--max-slots", str(MAX_SLOTS), "--max-ctx", str(MAX_CTX)]

    def judge(daemon: Child) -> list[str]:
        return soak(daemon, args.clients, args.seconds, args.idle)

    misses = judged(args.model, flags, judge)
    print("misses:", misses or "none")
    sys.exit(bool(misses))


def soak(daemon: Child, clients: int, seconds: float, idle_s: float) -> list[str]:
    """The clients' time and the time after it; what is wrong."""
    looks: list[Look] = []
    with Control(control_endpoint(daemon.endpoint)) as control:

        def look() -> None:
            looks.append(Look(control.stats()["steps"], figures(daemon.process.pid)))

        touch_all_pages(daemon.endpoint)
        works = load(daemon.endpoint, clients, seconds, max(0.2, seconds / LOOKS), look)
    show(works)
    warm = looks[int(len(looks) * WARM_UP) :]
    misses = [*grows(warm), *differing(works)]
    share = idle_share(daemon, idle_s)
    print(f"idle for {idle_s:g} s with a client and a slot: {share * 100:.2f} % of a processor")
    return misses + [f"idle: {share * 100:.2f} % of a processor"] * (share >= IDLE)


def grows(looks: Sequence[Look]) -> list[str]:
    """What the daemon holds more and more of. Memory is judged by the line through all looks."""
    first, last = looks[0], looks[-1]
    steps = last.steps - first.steps
    rss_kb = [float(look.held.rss_kb) for look in looks]
    slope = float(np.polyfit([float(look.steps) for look in looks], rss_kb, 1)[0])
    per = min(PER_STEPS, steps)
    growth_kb = slope * per
    tenths = [f"{rss_kb[i * (len(rss_kb) - 1) // 10] / 1024:.1f}" for i in range(11)]
    print(f"\nin {steps} steps after the warm-up: {first.held}, then {last.held}")
    print(f"resident memory {', '.join(tenths)} MB: {growth_kb:+.0f} KB in {per} steps")
    misses = [f"{growth_kb:.0f} KB in {per} steps"] * (growth_kb >= GROWTH_KB)
    return [*misses, *grown(first.held, last.held, math.inf)]


def idle_share(daemon: Child, seconds: float) -> float:
    """The part of a processor that the daemon uses while a client holds a slot and asks nothing."""
    pid = daemon.process.pid
    with Client(daemon.endpoint) as client, client.open([1, 2, 3]) as slot:
        slot.step()
        time.sleep(1.0)
        begin, before = time.monotonic(), figures(pid).cpu_s
        time.sleep(seconds)
        return (figures(pid).cpu_s - before) / (time.monotonic() - begin)


if __name__ == "__main__":
    main()
