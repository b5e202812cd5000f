"""Which rows run next: queued steps, streams and prompts become plans of one launch each."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from latentd.plans import OpenTask, StepPlan, StepTask, StreamTask
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.plans import Task
    from latentd.slots import SlotTable


class Scheduler:
    """Queues of admitted work. A task is in exactly one queue, or launched, or done."""

    def __init__(self, slots: SlotTable, page_rows: int, prefill_chunk: int) -> None:
        self.slots = slots
        self.page_rows = page_rows
        self.prefill_chunk = prefill_chunk
        self.steps: list[StepTask] = []
        self.streams: dict[StreamTask, None] = {}  # in the order of admission
        self.opens: deque[OpenTask] = deque()

    @property
    def has_rows(self) -> bool:
        """Whether a plan could be made now."""
        return bool(
            self.steps
            or (self.opens and not self.opens[0].in_flight)
            or any(map(self.is_runnable, self.streams))
        )

    @staticmethod
    def is_runnable(task: StreamTask) -> bool:
        """Whether a stream may take its next step."""
        return task.request.credit > 0 and not task.in_flight

    def decode_plan(self, starved: list[StreamTask]) -> StepPlan | None:
        """Rows of all queued steps and runnable streams; None without any. Streams that got no
        page are put into `starved` and left out."""
        steps, self.steps = self.steps, []
        tasks: list[StepTask | StreamTask] = [*steps]
        token_ids = [step.token for step in steps]
        logit_rows = [row for row, step in enumerate(steps) if step.want_logits]
        for stream in self.streams:
            if not self.is_runnable(stream):
                continue
            slot = stream.slot
            try:
                self.slots.extend(slot, slot.length + 1)
            except RequestRejected:
                starved.append(stream)
                continue
            stream.in_flight = True
            assert slot.token is not None
            tasks.append(stream)
            token_ids.append(slot.token)
        if not tasks:
            return None
        slots = [task.slot for task in tasks]  # a column at a time: half the time of rows
        slot_idx = [slot.slot_id for slot in slots]
        context_len = [slot.length + 1 for slot in slots]
        page_rows = self.page_rows
        kv_row = [
            slot.pages[slot.length // PAGE_SIZE] * page_rows + slot.length % PAGE_SIZE
            for slot in slots
        ]
        sampling = [task.sampling for task in tasks]
        updates, zero_pages = self.slots.take_updates()
        return StepPlan(
            len(tasks), tasks, token_ids, slot_idx, context_len, kv_row, sampling, logit_rows,
            False, True, updates, zero_pages, self.slots.take_moves(),
        )  # fmt: skip

    def chunk_plan(self) -> StepPlan | None:
        """The next chunk of the oldest prompt; None without any. Raises RequestRejected
        ("no_pages") with the prompt still at the head of its queue."""
        if not self.opens or self.opens[0].in_flight:
            return None
        task = self.opens[0]
        slot = task.slot
        first = slot.length
        end = min(first + self.prefill_chunk, len(task.prompt))
        self.slots.extend(slot, end)
        task.in_flight = True
        pos = np.arange(first, end, dtype=np.int64)
        pages = self.slots.table[slot.slot_id, pos // PAGE_SIZE].astype(np.int64)
        updates, zero_pages = self.slots.take_updates()
        is_last = end == len(task.prompt)
        return StepPlan(
            rows=end - first,
            tasks=[task],
            token_ids=task.prompt[first:end],
            slot_idx=slot.slot_id,
            context_len=(pos + 1).astype(np.int32),
            kv_row=pages * self.page_rows + pos % PAGE_SIZE,
            sampling=[task.sampling],
            logit_rows=[0] if is_last and task.request.want_logits else [],
            is_chunk=True,
            is_last=is_last,
            updates=updates,
            zero_pages=zero_pages,
            moves=self.slots.take_moves(),
        )

    def drop(self, task: Task) -> None:
        """Take a task out of its queue, if it is in one."""
        if isinstance(task, StreamTask):
            self.streams.pop(task, None)
        elif isinstance(task, StepTask):
            if task in self.steps:
                self.steps.remove(task)
        elif task in self.opens:
            self.opens.remove(task)
