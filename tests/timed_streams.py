"""A daemon for benchmarks, and streams of it that are read with a clock."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from latentd import demo
from latentd.commands.child import Child
from latentd.model.published import DEEPSEEK_V2_LITE
from latentd_client import Client
from tiny import TINY_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

CONFIGS = {"v2-lite": DEEPSEEK_V2_LITE, "tiny": TINY_CONFIG}
MODELS = ("demo", *CONFIGS)
READY_S = 400.0
CONTEXT = 100
"""Tokens in a slot before its stream."""
FIRST = 10
"""Tokens of a stream that are not counted."""


@contextmanager
def serve(model: str, device: str, *flags: str) -> Iterator[str]:
    """A daemon of one of MODELS, which is stopped at the end; its endpoint. All but demo have
    random weights made on the device."""
    with tempfile.TemporaryDirectory() as folder:
        given = [*source(model, Path(folder)), "--device", device, *flags]
        with Child(Path(folder), given) as child:
            try:
                child.wait_ready(READY_S, lambda status: None)
            except BaseException:
                print(child.log.read_text(errors="replace"))
                raise
            yield child.endpoint


def source(model: str, folder: Path) -> list[str]:
    """The flags for one of MODELS; `folder` is for its configuration."""
    if model == "demo":
        return ["--model", str(demo.model_dir())]
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    return ["--weights", "random", "--config", str(folder), "--name", model]


def prompt(seed: int, length: int = CONTEXT) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids from a seed; every model here has 256 at least."""
    return np.random.default_rng(seed).integers(1, 256, length).astype(np.int32)


def touch_all_pages(endpoint: str) -> None:
    """Have every page of the pool written once: on the cpu it takes no memory before."""
    with Client(endpoint) as client:
        longest = client.info.max_ctx - 1
        slots = [client.open(prompt(1000 + i, longest)) for i in range(client.info.max_slots)]
        for slot in slots:
            slot.close()


def stream(
    client: Client, steps: int, begun: Callable[[], object] = bool,
    is_over: Callable[[], bool] = bool,
) -> list[float]:  # fmt: skip
    """Times from token to token in us, of `steps` tokens or until `is_over`. `begun` is called when
    the stream runs."""
    slot = client.open(prompt(0))
    tokens = slot.stream(min(steps, client.info.max_ctx - CONTEXT))
    for _ in range(FIRST):
        next(tokens)
    begun()
    times, last = [], time.perf_counter()
    for _ in tokens:
        now = time.perf_counter()
        times.append((now - last) * 1e6)
        last = now
        if is_over():
            break
    slot.close()
    return times


def stream_beside(client: Client, work: Callable[[], T]) -> tuple[list[float], float, T]:
    """Times from token to token in us while `work` runs in a thread, its seconds and result."""
    done: list[tuple[float, T]] = []

    def run() -> None:
        begin = time.perf_counter()
        result = work()
        done.append((time.perf_counter() - begin, result))

    thread = threading.Thread(target=run)
    times = stream(client, 100_000, thread.start, lambda: not thread.is_alive())
    thread.join()
    return times, *done[0]


def shape(times: Sequence[float]) -> str:
    """Percentiles of times."""
    p50, p99, worst = np.percentile(times, (50, 99, 100))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f} ({len(times)})"
