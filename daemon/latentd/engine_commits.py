"""The commit of what has completed: slots change, requests get their results, events tell of it.

A row whose slot has another task by the time it completes, or none, is dropped: nothing of it was
ever counted.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from latentd.engine_attend import Attends
from latentd.operations import AttendDone, OpenDone, StepRequest, StreamTokens, VerifyDone
from latentd.plans import OpenTask, StreamTask
from latentd.verifying import VerifyTask, count_accepted
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.engine_stats import EngineStats
    from latentd.extras import Top
    from latentd.operations import Event
    from latentd.plans import StepOutputs, StepPlan
    from latentd.scheduler import Scheduler
    from latentd.slots import SlotTable


class Commits:
    """Commits outputs of plans; `events` collects what run() returns next."""

    def __init__(self, slots: SlotTable, scheduler: Scheduler, counters: EngineStats) -> None:
        self.slots = slots
        self.scheduler = scheduler
        self.counters = counters
        self.events: list[Event] = []

    def rows(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Commit a decode plan."""
        events, full, row = self.events, self.slots.full, 0
        is_plain = outputs.scores is None and not outputs.logits
        for task, token, logprob in zip(plan.tasks, outputs.tokens, outputs.logprobs, strict=True):
            top = None if is_plain else outputs.top(plan, row)
            if isinstance(task, StepRequest):
                slot, length = task.slot, task.pos + 1
                if slot.task is task:
                    slot.task = None
                    slot.tokens[task.pos] = task.row[0]
                    slot.token = token
                    slot.length = length
                    if not length % PAGE_SIZE:
                        full.append(slot)
                task.result = length, token, logprob
                if not is_plain:
                    task.logits, task.top = outputs.logits.get(row), top
                events.append(task)
            elif isinstance(task, StreamTask):
                task.ahead -= 1
                if task.slot.task is task:
                    self._commit_stream(task, token, logprob, top)
            elif isinstance(task, VerifyTask) and (row == 0 or plan.tasks[row - 1] is not task):
                self._commit_verify(task, plan, outputs, row)
            row += 1  # noqa: SIM113 (enumerate makes a tuple a row)

    def chunk(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Commit a chunk of a prompt."""
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
        self.counters.first_tokens += 1
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

    def attends(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Commit attention."""
        assert outputs.attended is not None
        first = 0
        for task in plan.attends:
            o = outputs.attended[first : first + task.rows].reshape(*task.request.q.shape[:2], -1)
            self.events.append(AttendDone(task.request, Attends.commit(task), o))
            first += task.rows
