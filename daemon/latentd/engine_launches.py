"""Launches: what is in flight on the backend, and the commit of what completed.

Up to two launches are in flight, so that the device never waits for the host: while one runs, the
next is queued behind it, with rows whose tokens only the device knows. A slot knows what is
committed (`length`, `token`); what is launched beyond that is its task's `ahead`. A row whose slot
has another task by the time it completes, or none, is dropped: nothing of it was ever counted.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from latentd.attending import AttendTask
from latentd.engine_attend import Attends
from latentd.operations import AttendDone, Failed, OpenDone, StepDone, StreamTokens, VerifyDone
from latentd.plans import OpenTask, StepPlan, StepTask, StreamTask
from latentd.verifying import VerifyTask, count_accepted
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.engine_stats import EngineStats
    from latentd.extras import Top
    from latentd.operations import Event
    from latentd.plans import Backend, StepOutputs
    from latentd.scheduler import Scheduler
    from latentd.slots import Slot, SlotTable

MAX_IN_FLIGHT: Final = 2
"""Launches that a backend takes before the oldest is read back."""


class _Launch(NamedTuple):
    plan: StepPlan
    bucket: int
    start_s: float
    is_behind: bool  # it was queued behind another one


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
        self._last_end_ns = 0

    def launch(self) -> None:
        """Launch queued rows, up to MAX_IN_FLIGHT plans, and nothing behind one whose logits are
        still to be read."""
        launches, queued = self.in_flight, self.scheduler
        while queued.has_queued:  # mostly not after a step
            last = launches[-1].plan if launches else None
            if last is not None and (len(launches) >= MAX_IN_FLIGHT or last.logit_rows):
                return
            plan = self._next_plan(last)
            if plan is None:
                return
            start_s = time.perf_counter()
            bucket = plan.rows
            if not plan.is_chunk:
                bucket = self.buckets[bisect_left(self.buckets, bucket)]
            self.backend.launch(plan, bucket)
            self.slots.pool.note_launch()
            launches.append(_Launch(plan, bucket, start_s, last is not None))
            self.counters.fold()
            if self.slots.full:
                self.slots.note_full()

    def _next_plan(self, last: StepPlan | None) -> StepPlan | None:
        """What goes behind the last plan in flight: replays and chunks take turns, a replay first;
        while nobody decodes, chunks follow each other."""
        if last is None or not last.attends:
            plan = self.scheduler.attend_plan()
            if plan is not None:
                return plan
        if last is not None and not last.is_chunk and (chunk := self._chunk_plan()) is not None:
            return chunk
        plan = self._decode_plan()
        if plan is None and (last is None or self.scheduler.is_quiet):
            plan = self._chunk_plan()
        return self.scheduler.attend_plan() if plan is None else plan

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
                text = f"in the middle of the prompt: {refusal}"
                self.end(slot, "", refusal.code, text, refusal.detail)
                self.slots.free(slot)

    def settle(self) -> None:
        """Wait until nothing is in flight; the events come with the next run()."""
        while self.in_flight:
            self._finish()

    def finish(self) -> None:
        """Wait for the oldest launch and commit its rows; so with what has completed meanwhile."""
        self._finish()
        while self.in_flight and self.backend.is_done():
            self._finish()

    def _finish(self) -> None:
        outputs = self.backend.wait()
        launch = self.in_flight.popleft()
        self.slots.pool.note_done()
        plan, counters = launch.plan, self.counters
        step_us = (time.perf_counter() - launch.start_s) * 1e6
        if launch.is_behind:
            counters.idle_ns.append(outputs.start_ns - self._last_end_ns)
        self._last_end_ns = outputs.end_ns
        if plan.attends:
            counters.attend_times.add(outputs.device_us, step_us)
            counters.attend_rows += plan.rows
            self._commit_attends(plan, outputs)
        elif plan.is_chunk:
            counters.chunk_times.add(outputs.device_us, step_us)
            counters.prompt_tokens += plan.rows
            self._commit_chunk(plan, outputs)
        else:
            counters.done.append((launch.bucket, plan.rows, outputs.device_us, step_us))
            self._commit_rows(plan, outputs)

    def _commit_rows(self, plan: StepPlan, outputs: StepOutputs) -> None:
        events, logits, row = self.events, outputs.logits, 0
        for task, token, logprob in zip(plan.tasks, outputs.tokens, outputs.logprobs, strict=True):
            top = outputs.top(plan, row) if outputs.scores is not None else None
            if isinstance(task, StepTask):
                slot, length = task.slot, task.pos + 1
                if slot.task is task:
                    slot.task = None
                    slot.tokens[task.pos] = task.token
                    slot.token = token
                    slot.length = length
                    if not length % PAGE_SIZE:
                        self.slots.full.append(slot)
                of_row = logits.get(row) if logits else None
                events.append(StepDone(task, length, token, logprob, of_row, top))
            elif isinstance(task, StreamTask):
                task.ahead -= 1
                if task.slot.task is task:
                    self._commit_stream(task, token, logprob, top)
            elif isinstance(task, VerifyTask) and (row == 0 or plan.tasks[row - 1] is not task):
                self._commit_verify(task, plan, outputs, row)
            row += 1  # noqa: SIM113 (enumerate makes a tuple a row)

    def _commit_chunk(self, plan: StepPlan, outputs: StepOutputs) -> None:
        task = plan.tasks[0]
        assert isinstance(task, OpenTask)
        slot = task.slot
        if slot.task is not task:
            return
        task.ahead -= plan.rows
        if outputs.prompt_scores is not None and task.prompt_scores is not None:
            task.prompt_scores.put(slot.length + 1, outputs.prompt_scores)
        first, slot.length = slot.length, slot.length + plan.rows
        slot.tokens[first : slot.length] = task.prompt[first : slot.length].data
        self.slots.full.append(slot)
        if not plan.is_last:
            return
        slot.task = None
        slot.token = outputs.tokens[0]
        self.counters.tokens += 1
        if slot.chain and task.prompt_scores is None:
            self.counters.note_prompt(task.request.cached_tokens)
        self.events.append(
            OpenDone(
                task.request, slot.length, slot.token, outputs.logprobs[0], outputs.logits.get(0),
                outputs.top(plan, 0), task.prompt_scores,
            )
        )  # fmt: skip

    def _commit_stream(self, task: StreamTask, token: int, logprob: float, top: Top | None) -> None:
        request, slot = task.request, task.slot
        task.steps += 1
        request.credit -= 1
        slot.tokens[slot.length] = task.token
        slot.length += 1
        slot.token = task.token = token
        if not slot.length % PAGE_SIZE:
            self.slots.full.append(slot)
        end = None
        if task.meets_stop(token):
            end = "stop"
        elif task.steps >= request.max_steps:
            end = "max_steps"
        elif slot.length >= self.slots.max_ctx:
            end = "context_full"
        elif not task.ahead:
            end = task.end
        if end is not None:
            slot.task = None
            self.scheduler.drop(task)
            self.slots.cut(slot, slot.length)  # what it had claimed for a row that is in vain
        tops = [] if top is None else [top]
        self.events.append(
            StreamTokens(request, slot.length, [token], [logprob], slot.length, end, tops)
        )

    def _commit_verify(
        self, task: VerifyTask, plan: StepPlan, outputs: StepOutputs, first: int
    ) -> None:
        """Commit the rows from `first` on up to the first wrong guess; the others leave nothing."""
        slot, request, end = task.slot, task.request, first + task.rows
        count = 1 + count_accepted(request.draft, outputs.tokens[first:end], request.stop)
        rows, length = slice(first, first + count), request.pos + count
        if slot.task is task:
            slot.task = None
            slot.tokens[request.pos : length] = array("i", task.tokens[:count])
            slot.length = length
            slot.token = outputs.tokens[rows][-1]
            self.slots.cut(slot, length)
            self.slots.full.append(slot)
        self.counters.drafted += len(request.draft)
        self.counters.accepted += count - 1
        tops = [outputs.top(plan, row) for row in range(first, first + count)]
        self.events.append(
            VerifyDone(
                request, length, outputs.tokens[rows], outputs.logprobs[rows],
                [top for top in tops if top is not None],
            )
        )  # fmt: skip

    def _commit_attends(self, plan: StepPlan, outputs: StepOutputs) -> None:
        assert outputs.attended is not None
        first = 0
        for task in plan.attends:
            o = outputs.attended[first : first + task.rows].reshape(*task.request.q.shape[:2], -1)
            self.events.append(AttendDone(task.request, Attends.commit(task), o))
            first += task.rows

    def end(
        self, slot: Slot, end: str, code: str, message: str,
        detail: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        """End the task of a slot at once, whatever of it is in flight: a stream with `end`, others
        as Failed, but for launched steps and drafts, whose result is told all the same."""
        task = slot.task
        slot.task = None
        if isinstance(task, StreamTask):
            self.scheduler.drop(task)
            self.events.append(StreamTokens(task.request, slot.length, [], [], slot.length, end))
        elif isinstance(task, OpenTask | StepTask | VerifyTask | AttendTask):
            if not self.scheduler.drop(task) and not isinstance(task, OpenTask):
                return
            if isinstance(task, AttendTask):
                for run in task.runs:  # one of its slots is closed: the others are idle again
                    run.slot.task = None
            self.counters.failed[code] += 1
            self.events.append(Failed(task.request, code, message, detail or {}))
