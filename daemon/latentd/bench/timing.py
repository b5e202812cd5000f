"""Median times of launches and of captured graphs."""

from __future__ import annotations

from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BUDGET_MS: Final = 20.0
_BLOCKS: Final = 5
_FEWEST: Final = 2
_MOST: Final = 20
_WARM_UP: Final = 2
_UNTIMED: Final = 2
"""Launches at the start of a block: what is timed follows launches of its own kind only."""


def median_us(launch: Callable[[], object], stream: int) -> float:
    """Median microseconds of what `launch` puts into the stream: see `medians_us`."""
    return medians_us([launch], stream)[0]


def medians_us(launches: Sequence[Callable[[], object]], stream: int) -> list[float]:
    """Microseconds of what each puts into the stream, the medians of its blocks: some launches that
    are not timed, then some that are, between two events and all queued; then comes the next one's
    block. So no time holds the host's part of a launch, nor what another left in the caches, and
    what changes slowly (temperature, clocks) meets all alike."""
    start, end = driver.Event(), driver.Event()

    def block_us(launch: Callable[[], object], count: int) -> float:
        for _ in range(_UNTIMED):
            launch()
        start.record(stream)
        for _ in range(count):
            launch()
        end.record(stream)
        end.synchronize()
        return end.elapsed_ms(start) * 1e3 / count

    try:
        slowest = max(block_us(launch, 1) for launch in launches)
        count = int(min(_MOST, max(_FEWEST, _BUDGET_MS * 1e3 / _BLOCKS / slowest)))
        blocks = [[block_us(launch, count) for launch in launches] for _ in range(_BLOCKS)]
    finally:
        start.close()
        end.close()
    return [median(of_one) for of_one in zip(*blocks, strict=True)]


def capture(run: Callable[[], None], stream: int) -> driver.Graph:
    """The graph of the launches that `run` makes on the stream; nothing is executed."""
    driver.synchronize(stream)
    driver.begin_capture(stream)
    try:
        run()
    except BaseException:
        driver.abort_capture(stream)
        raise
    graph = driver.end_capture(stream)
    graph.upload(stream)
    return graph


def replay_us(graph: driver.Graph, stream: int) -> float:
    """Median microseconds of a replay."""
    return median_us(lambda: graph.launch(stream), stream)


def graph_us(run: Callable[[], None], stream: int) -> float:
    """Median microseconds of a replay of what `run` launches through our own launches."""
    run()
    graph = capture(run, stream)
    try:
        return replay_us(graph, stream)
    finally:
        graph.close()


def torch_graph_us(run: Callable[[], object]) -> float:
    """The same for what `run` does with torch on its current stream: allocations are allowed."""
    with torch_graph(run) as graph:
        return median_us(graph.replay, torch.cuda.current_stream().cuda_stream)


@contextmanager
def torch_graph(run: Callable[[], object]) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what `run` does with torch on its current stream."""
    stream = torch.cuda.current_stream()
    for _ in range(_WARM_UP):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
        yield graph
    finally:
        graph.reset()
        torch.cuda.empty_cache()
