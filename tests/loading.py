"""Load on a daemon: clients in processes of their own, and their figures."""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import TYPE_CHECKING, Final

import numpy as np

import load_clients
from latentd.bench.report import Column, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from load_clients import Work

COLUMNS: Final = (
    Column("operation", "operation", width=10),
    Column("count", "count", width=10),
    *(Column(name, f"{name} us", 1, 11) for name in ("p50", "p99", "p99.9", "max")),
)


def load(
    endpoint: str, clients: int, seconds: float, every_s: float, look: Callable[[], object]
) -> list[Work]:
    """Have clients work for some seconds, and look every `every_s` of them while all do. Raises
    what a client has met."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients + 1)
    with context.Pool(clients, load_clients.keep_barrier, (barrier,)) as pool:
        jobs = [(endpoint, number, seconds) for number in range(clients)]
        results = pool.starmap_async(load_clients.work, jobs, chunksize=1)
        barrier.wait(load_clients.START_S)
        begin = time.monotonic()
        for number in range(1, round(seconds / every_s)):
            results.wait(begin + number * every_s - time.monotonic())
            if results.ready():
                break
            look()
        return results.get()


def show(works: Sequence[Work]) -> None:
    """Print the clients' times by operation."""
    report = Report(sys.stdout, as_json=False)
    report.table("operations", "as the clients see them; of a stream, token to token", COLUMNS)
    for name in load_clients.OPERATIONS:
        times = np.concatenate([work.times[name] for work in works])
        p50, p99, p999, worst = (float(t) for t in np.percentile(times, (50, 99, 99.9, 100)))
        values = {"p50": p50, "p99": p99, "p99.9": p999, "max": worst}
        report.add(operation=name, count=len(times), **values)


def differing(works: Sequence[Work]) -> list[str]:
    """The prompts whose texts have other bits in one client than in another."""
    texts = dict(item for work in works for item in work.texts.items())
    return [
        f"prompt {which} has other bits in client {number}"
        for number, work in enumerate(works)
        for which, text in work.texts.items()
        if text != texts[which]
    ]
