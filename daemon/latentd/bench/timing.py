"""Median times of launches and of captured graphs."""

from __future__ import annotations

from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BUDGET_MS: Final = 60.0
_FEWEST: Final = 7
_MOST: Final = 50
_WARM_UP: Final = 2


def median_us(launch: Callable[[], object], stream: int) -> float:
    """Median microseconds of what `launch` puts into the stream, between two events."""
    return medians_us([launch], stream)[0]


def medians_us(launches: Sequence[Callable[[], object]], stream: int) -> list[float]:
    """The same for several, launched in turn, so that what changes with time (clocks, the memory's
    state) meets all of them alike."""
    start, end = driver.Event(), driver.Event()

    def once(launch: Callable[[], object]) -> float:
        start.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        return end.elapsed_ms(start)

    try:
        slowest = max(sum(once(launch) for launch in launches) for _ in range(_WARM_UP))
        count = int(min(_MOST, max(_FEWEST, _BUDGET_MS * len(launches) / slowest)))
        times = [[once(launch) for launch in launches] for _ in range(count)]
    finally:
        start.close()
        end.close()
    return [median(of_one) * 1e3 for of_one in zip(*times, strict=True)]


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
