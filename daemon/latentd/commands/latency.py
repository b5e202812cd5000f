"""Latency and throughput of a running daemon, measured through the client, for bench and demo."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from latentd.engine_figures import RING_STEPS
from latentd_client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Barrier

    from latentd_client import Slot

WARM_UP = 20
"""Requests (or tokens of a stream) at the start of each case that are not counted."""
NUM_TOKENS = 256
"""Tokens drawn for each slot; longer runs repeat them."""
START_TIMEOUT_S = 60.0
"""How long the clients of one case wait for each other."""

Times: TypeAlias = tuple[list[float], list[float], float]
"""Microseconds of each request of the warm-up and of those measured, and the seconds of these."""


@dataclass(frozen=True)
class Case:
    """What one measurement does: each of `clients` processes opens `rows` slots with prompts of
    `context` tokens and steps them in one request, or streams one slot, until `steps` requests or
    `seconds` are over. Tokens are random and differ from slot to slot: rows with equal tokens
    would choose the same experts, which makes a batch cheaper than it is."""

    kind: Literal["step", "stream"]
    rows: int
    clients: int
    context: int
    steps: int
    seconds: float

    @property
    def name(self) -> str:
        """What the table calls it."""
        what = "1 slot" if self.rows == 1 else f"{self.rows} slots in one request"
        who = "" if self.clients == 1 else f", {self.clients} clients"
        return f"{self.kind}, {what}{who}"


@dataclass(frozen=True)
class Measured:
    """The outcome of a case. Times are microseconds of a whole request as the client sees it (in
    a stream: from token to token); `device_us` is the median of the device's own times of the
    last steps (at most RING_STEPS), None where others than this case's may be among them: the
    bucket varies, or the case was too short to push out those before it. `over_device_us` is what
    the median request of those same steps took beyond it."""

    case: str
    requests: int
    p50_us: float
    p90_us: float
    p99_us: float
    device_us: float | None
    over_device_us: float | None
    tokens_per_s: float


def measure(endpoint: str, case: Case) -> Measured:
    """Run one case against the daemon at `endpoint`, in this process or, for several clients, in
    one process each. Raises LatentdError for what the daemon refuses."""
    before, _ = _device(endpoint, case.rows)
    if case.clients == 1:
        warm_up, times, elapsed_s = _run(endpoint, case, lambda: None)
    else:
        warm_up, times, elapsed_s = _run_processes(endpoint, case)
    after, device_us = _device(endpoint, case.rows)
    if case.clients > 1 or after - before < min(after, RING_STEPS):
        device_us = None
    p50, p90, p99 = (round(float(value), 1) for value in np.percentile(times, (50, 90, 99)))
    return Measured(
        case=case.name,
        requests=len(times),
        p50_us=p50,
        p90_us=p90,
        p99_us=p99,
        device_us=device_us,
        over_device_us=None if device_us is None else _over(device_us, warm_up + times),
        tokens_per_s=round(len(times) * case.rows / elapsed_s, 1),
    )


def _over(device_us: float, times: list[float]) -> float:
    """What the median request took beyond the device's median, both of the steps that the daemon
    looks back on: in a short case those of the warm-up are among them, and may be slower."""
    return round(statistics.median_high(times[-RING_STEPS:]) - device_us, 1)


def _device(endpoint: str, rows: int) -> tuple[int, float | None]:
    """How many steps the bucket that holds `rows` has run, and the device's median over the last
    RING_STEPS of them."""
    with Client(endpoint) as client:
        bucket = str(min(size for size in client.info.buckets if size >= rows))
        stats = client.stats()
    steps, times = (stats.get(key) for key in ("steps_by_bucket", "device_us"))
    count = steps.get(bucket, 0) if isinstance(steps, dict) else 0
    median = times.get(bucket) if isinstance(times, dict) else None
    return int(count), float(median["p50"]) if median else None


def _run(endpoint: str, case: Case, start: Callable[[], object]) -> Times:
    """Measure; `start` is called after the warm-up."""
    with Client(endpoint, timeout_s=START_TIMEOUT_S) as client:
        vocab_size = client.info.vocab_size
        rng = np.random.default_rng(os.getpid())
        prompts = rng.integers(vocab_size, size=(case.rows, case.context), dtype=np.int32)
        slots = [client.open(prompt) for prompt in prompts]
        tokens = rng.integers(vocab_size, size=(NUM_TOKENS, case.rows)).tolist()
        if case.kind == "step":
            ticks = _step(client, slots, case, tokens)
        else:
            ticks = _stream(client, slots[0])
        warm_up = list(_clock(ticks, WARM_UP))
        start()
        times: list[float] = []
        begin = time.perf_counter()
        for time_us in _clock(ticks, case.steps):
            times.append(time_us)
            if (elapsed_s := time.perf_counter() - begin) > case.seconds:
                break
        for slot in slots:
            slot.close()
        return warm_up, times, elapsed_s


def _clock(ticks: Iterator[None], most: int) -> Iterator[float]:
    """How long each turn takes, in microseconds."""
    last = time.perf_counter()
    for _ in itertools.islice(ticks, most):
        now = time.perf_counter()
        yield (now - last) * 1e6
        last = now


def _step(client: Client, slots: list[Slot], case: Case, tokens: list[list[int]]) -> Iterator[None]:
    """Each turn is one request that steps all slots by their next tokens; full slots start over."""
    for row in itertools.cycle(tokens):
        if slots[0].context_len >= client.info.max_ctx:
            for slot in slots:
                slot.truncate(case.context)
        if len(slots) == 1:
            slots[0].step(token=row[0])
        else:
            client.step(list(zip(slots, row, strict=True)))
        yield


def _stream(client: Client, slot: Slot) -> Iterator[None]:
    """Each turn is one token of a stream; a full slot starts over."""
    context = slot.context_len
    while True:
        for _ in slot.stream(max_steps=client.info.max_ctx - slot.context_len):
            yield
        slot.truncate(context)
        slot.step(token=1)


def _run_processes(endpoint: str, case: Case) -> Times:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(case.clients)
    with context.Pool(case.clients, _keep_barrier, (barrier,)) as pool:
        results = pool.starmap(_work, [(endpoint, case)] * case.clients, chunksize=1)
    warm_up = [time_us for result, _, _ in results for time_us in result]
    times = [time_us for _, result, _ in results for time_us in result]
    return warm_up, times, max(elapsed_s for _, _, elapsed_s in results)


_barrier: Barrier | None = None


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _work(endpoint: str, case: Case) -> Times:
    """One client's share, in a process of its own."""
    assert _barrier is not None
    barrier = _barrier
    return _run(endpoint, case, lambda: barrier.wait(START_TIMEOUT_S))
