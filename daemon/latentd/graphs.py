"""Graphs of whole decode steps, one a bucket: warmed eagerly, captured largest first, replayed.

Capture records and executes nothing. The step's buffers must outlive the graphs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Graphs:
    """Captured steps by bucket. `capture_s` and `num_bytes` tell what they cost."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.capture_s = 0.0
        self.num_bytes = 0
        self.num_nodes: dict[int, int] = {}
        self._graphs: dict[int, driver.Graph] = {}

    def capture(
        self, buckets: Sequence[int], run: Callable[[int], None], num_launches: Callable[[], int]
    ) -> None:
        """Capture `run(bucket)` for every bucket, in place of a graph that it has; each must have
        run eagerly before.

        `num_launches` counts the kernel launches so far: a graph must have a node for each launch
        of its capture and no other, so that nothing was lost and nothing foreign came in.
        """
        start_s = time.perf_counter()
        driver.synchronize(self.stream)
        free_before, _ = driver.memory_info()
        for bucket in sorted(buckets, reverse=True):
            first = num_launches()
            driver.begin_capture(self.stream)
            try:
                run(bucket)
            except BaseException:
                driver.abort_capture(self.stream)
                raise
            graph = driver.end_capture(self.stream)
            launches = num_launches() - first
            assert graph.num_nodes == launches, (
                f"bucket {bucket}: {graph.num_nodes} nodes of {launches} launches"
            )
            graph.upload(self.stream)
            if bucket in self._graphs:
                self._graphs[bucket].close()
            self._graphs[bucket] = graph
            self.num_nodes[bucket] = graph.num_nodes
        driver.synchronize(self.stream)
        free_after, _ = driver.memory_info()
        self.num_bytes = max(0, free_before - free_after)
        self.capture_s = time.perf_counter() - start_s

    def launch(self, bucket: int) -> None:
        """Replay a bucket's step."""
        self._graphs[bucket].launch(self.stream)

    def close(self) -> None:
        """Free the graphs; none may be running."""
        driver.synchronize(self.stream)
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
