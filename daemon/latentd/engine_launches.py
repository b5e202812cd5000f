"""Launches: what is in flight on the backend, and the commit of what completed.

At most one decode launch and one prompt chunk are in flight. Slots change only here (a commit)
and in the engine's own truncate and close.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from latentd.operations import Failed, OpenDone, StepDone, StreamTokens
from latentd.plans import OpenTask, StepPlan, StepTask, StreamTask
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.engine_stats import EngineStats
    from latentd.operations import Event
    from latentd.plans import Backend, StepOutputs
    from latentd.scheduler import Scheduler
    from latentd.slots import Slot, SlotTable


class _Launch(NamedTuple):
    plan: StepPlan
    bucket: int
    start_s: float


class Launches:
    """Plans, launches and commits; `events` collects what run() returns next."""

    def __init__(
        self,
        slots: SlotTable,
        scheduler: Scheduler,
        backend: Backend,
        buckets: tuple[int, ...],
        counters: EngineStats,
    ) -> None:
        self.slots = slots
        self.scheduler = scheduler
        self.backend = backend
        self.buckets = buckets
        self.counters = counters
        self.events: list[Event] = []
        self.in_flight: deque[_Launch] = deque()

    def launch(self) -> None:
        """Launch queued rows: one decode plan and one prompt chunk at most in flight, and nothing
        behind a plan whose logits are still to be read."""
        launches, queued = self.in_flight, self.scheduler
        while queued.steps or queued.streams or queued.opens:  # mostly false after a step
            last = launches[-1].plan if launches else None
            if last is not None and (len(launches) > 1 or last.logit_rows):
                return
            plan = None
            if last is None or last.is_chunk:
                plan = self._decode_plan()
            if plan is None and queued.opens and (last is None or not last.is_chunk):
                plan = self._chunk_plan()
            if plan is None:
                return
            start_s = time.perf_counter()
            bucket = plan.rows
            if not plan.is_chunk:
                bucket = self.buckets[bisect_left(self.buckets, bucket)]
            self.backend.launch(plan, bucket)
            launches.append(_Launch(plan, bucket, start_s))
            self.counters.fold()

    def _decode_plan(self) -> StepPlan | None:
        starved: list[StreamTask] = []
        plan = self.scheduler.decode_plan(starved)
        for task in starved:
            self.end(task.slot, "no_pages", "no_pages", "")
        return plan

    def _chunk_plan(self) -> StepPlan | None:
        while True:
            try:
                return self.scheduler.chunk_plan()
            except RequestRejected as refusal:
                slot = self.scheduler.opens[0].slot
                self.end(slot, "", refusal.code, f"in the middle of the prompt: {refusal}")
                self.slots.free(slot)

    def settle(self, slot: Slot) -> None:
        """Wait until no row of the slot is in flight; the events come with the next run()."""
        while any(task.slot is slot for launch in self.in_flight for task in launch.plan.tasks):
            self.finish()

    def finish(self) -> None:
        """Wait for the oldest launch and commit its rows."""
        outputs = self.backend.wait()
        plan, bucket, start_s = self.in_flight.popleft()
        step_us = (time.perf_counter() - start_s) * 1e6
        counters = self.counters
        if plan.is_chunk:
            task = plan.tasks[0]
            assert isinstance(task, OpenTask)
            counters.chunk_times.add(outputs.device_us, step_us)
            counters.prompt_tokens += plan.rows
            self._commit_chunk(task, plan, outputs)
            return
        counters.done.append((bucket, plan.rows, outputs.device_us, step_us))
        events, logits, row = self.events, outputs.logits, 0
        for decode, token, logprob in zip(
            plan.tasks, outputs.tokens, outputs.logprobs, strict=True
        ):
            slot = decode.slot
            slot.token = token
            slot.length = length = slot.length + 1
            if isinstance(decode, StepTask):
                slot.task = None
                of_row = logits.get(row) if logits else None
                events.append(StepDone(decode, length, token, logprob, of_row))
            elif isinstance(decode, StreamTask):
                self._commit_stream(decode, token, logprob)
            row += 1  # noqa: SIM113 (enumerate makes a tuple a row)

    def _commit_chunk(self, task: OpenTask, plan: StepPlan, outputs: StepOutputs) -> None:
        slot = task.slot
        slot.length += plan.rows
        task.in_flight = False
        if not plan.is_last:
            return
        self.scheduler.drop(task)
        slot.task = None
        slot.token = outputs.tokens[0]
        self.counters.tokens += 1
        self.events.append(
            OpenDone(
                task.request, slot.length, slot.token, outputs.logprobs[0], outputs.logits.get(0)
            )
        )

    def _commit_stream(self, task: StreamTask, token: int, logprob: float) -> None:
        request, slot = task.request, task.slot
        task.in_flight = False
        task.steps += 1
        request.credit -= 1
        end = None
        if token in request.stop:
            end = "stop"
        elif task.steps >= request.max_steps:
            end = "max_steps"
        elif slot.length >= self.slots.max_ctx:
            end = "context_full"
        if end is not None:
            slot.task = None
            self.scheduler.drop(task)
        self.events.append(StreamTokens(request, slot.length, [token], [logprob], slot.length, end))

    def end(self, slot: Slot, end: str, code: str, message: str) -> None:
        """End the task of a slot without running it: a stream with `end`, others as Failed."""
        task = slot.task
        slot.task = None
        if isinstance(task, StreamTask):
            self.scheduler.drop(task)
            self.events.append(StreamTokens(task.request, slot.length, [], [], slot.length, end))
        elif isinstance(task, OpenTask | StepTask):
            self.scheduler.drop(task)
            self.counters.failed[code] += 1
            self.events.append(Failed(task.request, code, message))
