"""Cancels: stopping what was admitted, for whoever asks or because its time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.attending import AttendRequest, AttendTask
from latentd.operations import Failed, StepRequest
from latentd.plans import OpenTask, StreamTask
from latentd.verifying import VerifyTask

if TYPE_CHECKING:
    from latentd.engine_launches import Launches
    from latentd.operations import Reason, Request
    from latentd.plans import Task
    from latentd.slots import Slot, SlotTable

TEXTS: Final[dict[Reason, str]] = {
    "cancelled": "the request was cancelled",
    "deadline": "the time was over before the work could start",
    "draining": "the daemon is about to stop; use another one",
}


class Cancels:
    """Stops requests; a slot is left as it was before what has not begun."""

    def __init__(self, slots: SlotTable, launches: Launches) -> None:
        self.slots = slots
        self.launches = launches

    def cancel(self, request: Request, reason: Reason) -> Failed | None:
        """See EngineProtocol."""
        slot_id = request.rows[0][0] if isinstance(request, AttendRequest) else request.slot_id
        slot = self.slots.slots[slot_id]
        task = slot.task
        if isinstance(task, StreamTask) and task.request is request:
            return self._cancel_stream(slot, task, reason)
        kinds = OpenTask | StepRequest | VerifyTask | AttendTask
        if isinstance(task, kinds) and task.request is request:
            return self._take_back(task, reason)
        return None

    def _cancel_stream(self, slot: Slot, task: StreamTask, reason: Reason) -> Failed | None:
        if reason == "deadline":
            return None if task.steps or task.ahead else self._take_back(task, reason)
        if task.ahead:
            task.end = reason  # when what runs is committed
        else:
            self.launches.end(slot, reason, reason, "")
        return None

    def _take_back(self, task: Task, reason: Reason) -> Failed | None:
        """Fail a task of which nothing is launched, or a prompt; what is launched goes on."""
        text = TEXTS[reason]
        if not self.launches.scheduler.drop(task) and not isinstance(task, OpenTask):
            return None
        if isinstance(task, OpenTask):
            if reason == "deadline":
                text = "the time was over before the prompt was in"
            self.slots.free(task.slot)
        elif isinstance(task, AttendTask):
            for run in task.runs:
                run.slot.task = None
        else:
            task.slot.task, task.slot.sampling = None, task.before
            if task.slot.written is None:  # else its pages hold more than its length tells
                self.slots.cut(task.slot, task.slot.length)
        self.launches.counters.failed[reason] += 1
        failed = Failed(task.request, reason, text)
        self.launches.commits.events.append(failed)
        return failed
