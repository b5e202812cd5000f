"""Launches: what is in flight on the backend.

Up to two launches are in flight, so that the device never waits for the host: while one runs, the
next is queued behind it, with rows whose tokens only the device knows. A slot knows what is
committed (`length`, `token`); what is launched beyond that is its task's `ahead`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final

from latentd.attending import AttendTask
from latentd.engine_commits import Commits
from latentd.engine_figures import ATTEND, CHUNK, STEP
from latentd.engine_stats import LONG
from latentd.operations import Failed, StepRequest, StreamTokens
from latentd.plans import FED_TOKEN, OpenTask, StepPlan, StreamTask
from latentd.verifying import VerifyTask
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.engine_stats import EngineStats
    from latentd.operations import Event
    from latentd.plans import Backend
    from latentd.scheduler import Scheduler
    from latentd.slots import Slot, SlotTable

MAX_IN_FLIGHT: Final = 2
"""Launches that a backend takes before the oldest is read back."""


class Launches:
    """Plans, launches and commits."""

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
        self.commits = Commits(slots, scheduler, counters)
        self.in_flight: deque[StepPlan] = deque()

    def launch(self) -> None:
        """Launch queued rows, up to MAX_IN_FLIGHT plans, and nothing behind one whose logits are
        still to be read."""
        launches, queued = self.in_flight, self.scheduler
        while queued.has_queued:  # mostly not after a step
            last = launches[-1] if launches else None
            if last is not None and (len(launches) >= MAX_IN_FLIGHT or last.logit_rows):
                return
            plan = self._next_plan(last)
            if plan is None:
                return
            staged_ns = time.perf_counter_ns()
            bucket = rows = plan.rows
            if not plan.is_chunk:
                bucket = self.buckets[bisect_left(self.buckets, rows)]
            self.backend.launch(plan, bucket)
            launched_ns = time.perf_counter_ns()
            self.slots.pool.note_launch()
            launches.append(plan)
            kind = CHUNK if plan.is_chunk else ATTEND if plan.attends else STEP
            fed = -1 if last is None else 0
            if last is not None and queued.streams and kind == STEP:
                fed = plan.token_ids.count(FED_TOKEN)  # type: ignore[union-attr]
            self.counters.launched += (
                kind, rows, fed, plan.queued_ns, staged_ns, launched_ns,
            )  # fmt: skip
            if self.slots.full:
                self.slots.note_full()

    def _next_plan(self, last: StepPlan | None) -> StepPlan | None:
        """What goes behind the last plan in flight: replays and chunks take turns, a replay first;
        while nobody decodes, chunks follow each other."""
        queued = self.scheduler
        if queued.attends and (last is None or not last.attends):
            return queued.attend_plan()
        if last is not None and not last.is_chunk and (chunk := self._chunk_plan()) is not None:
            return chunk
        plan = queued.decode_plan()
        if queued.starved:
            self._end_starved()
        if plan is None and (last is None or queued.is_quiet):
            plan = self._chunk_plan()
        return queued.attend_plan() if plan is None and queued.attends else plan

    def _end_starved(self) -> None:
        starved, self.scheduler.starved = self.scheduler.starved, []
        for task in starved:
            self.end(task.slot, "no_pages", "no_pages", "")

    def _chunk_plan(self) -> StepPlan | None:
        while self.scheduler.opens:
            try:
                return self.scheduler.chunk_plan()
            except RequestRejected as refusal:
                slot = self.scheduler.opens[0].slot
                text = f"in the middle of the prompt: {refusal}"
                self.end(slot, "", refusal.code, text, refusal.detail)
                self.slots.free(slot)
        return None

    def settle(self) -> None:
        """Wait until nothing is in flight; the events come with the next run()."""
        while self.in_flight:
            self._finish()

    def finish(self) -> None:
        """Wait for the oldest launch and commit its rows; so with what has completed meanwhile."""
        if len(self.counters.ended) >= LONG:
            self.counters.fold()  # here, where nothing is to be done but to wait for the device
        self._finish()
        while self.in_flight and self.backend.is_done():
            self._finish()

    def take_events(self) -> list[Event]:
        """What has completed since the last call."""
        commits = self.commits
        events, commits.events = commits.events, []
        return events

    def _finish(self) -> None:
        outputs = self.backend.wait()
        plan = self.in_flight.popleft()
        self.slots.pool.note_done()
        self.counters.ended += (time.perf_counter_ns(), outputs.start_ns, outputs.end_ns)
        if plan.attends:
            self.commits.attends(plan, outputs)
        elif plan.is_chunk:
            self.commits.chunk(plan, outputs)
        else:
            self.commits.rows(plan, outputs)

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
            self.commits.events.append(
                StreamTokens(task.request, slot.length, [], [], slot.length, end)
            )
        elif isinstance(task, OpenTask | StepRequest | VerifyTask | AttendTask):
            if not self.scheduler.drop(task) and not isinstance(task, OpenTask):
                return
            if isinstance(task, AttendTask):
                for run in task.runs:  # one of its slots is closed: the others are idle again
                    run.slot.task = None
            self.counters.failed[code] += 1
            self.commits.events.append(Failed(task.request, code, message, detail or {}))
