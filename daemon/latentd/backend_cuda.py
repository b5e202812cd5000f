"""The cuda backend: staged steps as graph replays or eager launches, and the wait for each."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from latentd.backend_pages import PageCopies
from latentd.graphs import Graphs
from latentd.operations import DeviceFault
from latentd.plans import StepOutputs, StepPlan
from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.backend_steps import StepRunner
    from latentd.changes import Moves

SPIN_S: Final = 0.010
"""How long a wait spins (letting go of the interpreter lock) before it sleeps between looks."""
SLEEP_S: Final = 50e-6
LONG_S: Final = 300e-6
"""From when on a wait is a long one."""
QUERY_S: Final = 0.001
"""How often a wait asks the stream, so that a fault is seen and not waited for."""


class CudaBackend:
    """`Backend` over cubins on one stream. Decode plans replay their bucket's graph, unless
    `eager`; prompt chunks always run eagerly."""

    def __init__(
        self, runner: StepRunner, stream: int, num_launches: Callable[[], int], eager: bool
    ) -> None:
        self.runner = runner
        self.stream = stream
        self.graphs, self.attend_graphs = Graphs(stream), Graphs(stream)
        self.eager = eager
        self.graph_replays = self.graph_fallbacks = 0
        self.on_long_wait: Callable[[], None] = lambda: None
        self._num_launches = num_launches
        self._torch_stream = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]
        self._pending: deque[StepPlan] = deque()
        self._copies = PageCopies(runner.buffers.slab, stream)

    def warm(self, buckets: Sequence[int], attend_only: bool = False) -> None:
        """Run steps of padding rows in every bucket, eagerly: whatever is set up on first use is
        set up before a capture."""
        for bucket in buckets:
            runs = (self.runner.attend, self.runner.decode)[: 1 if attend_only else 2]
            for run in runs:
                self.runner.stage(StepPlan(0, [], [], [], [], [], []), bucket)
                self._pending.append(StepPlan(0, [], [], [], [], [], []))
                try:
                    run(bucket)
                except driver.DriverError as error:
                    raise DeviceFault(str(error)) from error
                self.wait()

    def capture(self, buckets: Sequence[int], attend_only: bool = False) -> None:
        """Capture the decode step of every bucket, and the one of attention."""
        self.attend_graphs.capture(buckets, self.runner.attend, self._num_launches)
        if not attend_only:
            self.graphs.capture(buckets, self.runner.decode, self._num_launches)

    def launch(self, plan: StepPlan, bucket: int) -> None:
        """Stage the plan and start it."""
        step = self.runner.launched
        self.runner.stage(plan, bucket)
        self._pending.append(plan)
        try:
            if plan.changes.moves is not None:
                self._move(plan.changes.moves)
            self.runner.place_limits(plan, step)
            if plan.attends:
                self._attend(bucket)
            elif plan.is_chunk:
                self.runner.prompt(plan, step)
            elif self.eager:
                self.runner.decode(bucket)
                self.graph_fallbacks += 1
            else:
                self.graphs.launch(bucket)
                self.graph_replays += 1
            self.runner.score(plan, step)
        except driver.DriverError as error:
            raise DeviceFault(str(error)) from error

    def _attend(self, bucket: int) -> None:
        if self.eager:
            self.runner.attend(bucket)
            self.graph_fallbacks += 1
        else:
            self.attend_graphs.launch(bucket)
            self.graph_replays += 1

    def move(self, moves: Moves) -> None:
        """See Backend."""
        try:
            self._move(moves)
        except driver.DriverError as error:
            raise DeviceFault(str(error)) from error

    def _move(self, moves: Moves) -> None:
        """Start moves. Raises DriverError."""
        slab, table = self.runner.buffers.slab, self.runner.buffers.inputs.block_table
        page_bytes, row_bytes = slab[0].nbytes, table[0].nbytes
        for source, target in moves.copies:
            at = slab.data_ptr() + source * page_bytes
            driver.copy(slab.data_ptr() + target * page_bytes, at, page_bytes, self.stream)
        for slot_id, first, pages in moves.rows:
            at = table.data_ptr() + slot_id * row_bytes + first * pages.itemsize
            driver.upload(at, pages.ctypes.data, pages.nbytes, self.stream)

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """See Backend."""
        try:
            return self._copies.read(pages)
        except driver.DriverError as error:
            raise DeviceFault(str(error)) from error

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """See Backend."""
        try:
            self._copies.write(pages, data)
        except driver.DriverError as error:
            raise DeviceFault(str(error)) from error

    def wait(self) -> StepOutputs:
        """Wait until the oldest plan's step number appears. Raises DeviceFault."""
        plan = self._pending.popleft()
        runner, logits = self.runner, {}
        try:
            self._wait_for(runner.oldest.step, runner.completed + 1)
            for number in runner.score_numbers(plan):
                self._wait_for(number, runner.completed + 1)
            if plan.logit_rows:
                logits = self._read_logits(plan.logit_rows)
        except (driver.DriverError, torch.AcceleratorError) as error:
            raise DeviceFault(str(error)) from error
        return runner.outputs(plan, logits)

    def is_done(self) -> bool:
        """Whether the oldest plan's step number is there."""
        return bool(self.runner.oldest.step[0] == self.runner.completed + 1)

    def _wait_for(self, number: memoryview, value: int) -> None:
        start_s = asked_s = time.perf_counter()
        while True:
            for _ in range(16):
                if number[0] == value:
                    return
                os.sched_yield()
            now_s = time.perf_counter()
            if now_s - asked_s > QUERY_S:
                asked_s = now_s
                if driver.is_idle(self.stream) and number[0] != value:
                    raise DeviceFault(f"the stream is empty, but step {value} was not published")
            if now_s - start_s > LONG_S:
                self.on_long_wait()
            if now_s - start_s > SPIN_S:
                time.sleep(SLEEP_S)

    def _read_logits(self, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        """Copies of rows of the step's logits; nothing may have been launched behind it."""
        logits = {}
        buffers = self.runner.buffers
        for row in rows:
            with torch.cuda.stream(self._torch_stream):
                buffers.logits_host.copy_(buffers.acts.logits[row], non_blocking=True)
            driver.synchronize(self.stream)
            logits[row] = buffers.logits_host.numpy().copy()
        return logits

    def close(self) -> None:
        """Free the graphs and the stream; the buffers go with their last reference."""
        self._copies.close()
        self.graphs.close()
        self.attend_graphs.close()
        driver.destroy_stream(self.stream)
