"""Cancels: stopping what was admitted, for whoever asks or because its time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.attending import AttendRequest, AttendTask
from latentd.operations import Failed
from latentd.plans import OpenTask, StepTask, StreamTask
from latentd.verifying import VerifyTask

if TYPE_CHECKING:
    from latentd.engine_launches import Launches
    from latentd.operations import Reason, Request
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

    def cancel(self, request: Request, reason: Reason) -> None:
        """See EngineProtocol."""
        slot_id = request.rows[0][0] if isinstance(request, AttendRequest) else request.slot_id
        slot = self.slots.slots[slot_id]
        task = slot.task
        if isinstance(task, OpenTask) and task.request is request:
            is_late = reason == "deadline"
            text = "the time was over before the prompt was in" if is_late else TEXTS[reason]
            self.launches.end(slot, reason, reason, text)
            self.slots.free(slot)
        elif isinstance(task, StreamTask) and task.request is request:
            self._cancel_stream(slot, task, reason)
        elif isinstance(task, StepTask | VerifyTask | AttendTask) and task.request is request:
            self._take_back(task, reason)

    def _cancel_stream(self, slot: Slot, task: StreamTask, reason: Reason) -> None:
        if reason == "deadline":
            if not task.steps and not task.ahead:
                self._take_back(task, reason)
        elif task.ahead:
            task.end = reason  # when what runs is committed
        else:
            self.launches.end(slot, reason, reason, "")

    def _take_back(
        self, task: StepTask | VerifyTask | StreamTask | AttendTask, reason: Reason
    ) -> None:
        """Fail a task of which nothing is launched; what is launched goes on."""
        if not self.launches.scheduler.drop(task):
            return
        if isinstance(task, AttendTask):
            for run in task.runs:
                run.slot.task = None
        else:
            task.slot.task, task.slot.sampling = None, task.before
            if task.slot.written is None:  # else its pages hold more than its length tells
                self.slots.cut(task.slot, task.slot.length)
        self.launches.counters.failed[reason] += 1
        self.launches.events.append(Failed(task.request, reason, TEXTS[reason]))
