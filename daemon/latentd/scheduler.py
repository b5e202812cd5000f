"""Which rows run next: queued steps, streams and prompts become plans of one launch each."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd.attending import AttendTask
from latentd.operations import StepRequest
from latentd.plans import FED_TOKEN, OpenTask, StepPlan, StreamTask
from latentd.room import Room
from latentd.scoring import scores_of_last, scores_of_prompt, scores_of_rows
from latentd.verifying import VerifyQueue, VerifyTask
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.extras import Extras
    from latentd.operations import Row, SamplingParams
    from latentd.plans import Task
    from latentd.sharing import Sharing
    from latentd.slots import Slot, SlotTable

AHEAD: Final = 2
"""Most rows of a stream in flight: the device feeds the second from the first."""
QUIET_CHUNKS: Final = 2
"""Prompt chunks in a row without a replay between them, after which nobody seems to decode: who
does asks again while one of them runs."""


class Scheduler:
    """Queues of admitted work. A task is in exactly one queue, or launched, or done. At most
    `prefill_rows` prompt rows run between two replays, and `prefill_chunk` while nobody decodes."""

    def __init__(
        self, slots: SlotTable, sharing: Sharing, page_rows: int, prefill_chunk: int,
        prefill_rows: int, verifies: VerifyQueue,
    ) -> None:  # fmt: skip
        self.slots = slots
        self.sharing = sharing
        self.page_rows = page_rows
        self.prefill_chunk = prefill_chunk
        self.prefill_rows = prefill_rows
        self.steps: list[StepRequest] = []
        self.steps_since_ns = 0  # when the first of them was queued
        self.streams: dict[StreamTask, None] = {}  # in the order of admission
        self.opens: deque[OpenTask] = deque()  # those whose last chunk is not launched
        self.verifies = verifies
        self.attends: list[AttendTask] = []
        self.room = Room(slots, self.opens)
        self.starved: list[StreamTask] = []  # by decode_plan, to be ended
        self._chunks = QUIET_CHUNKS  # launched since the last replay

    @property
    def has_rows(self) -> bool:
        """Whether a plan could be made now, if there are pages for it."""
        if self.steps or self.opens or self.verifies.tasks or self.attends:
            return True
        return bool(self.streams) and any(map(self.is_runnable, self.streams))

    @property
    def has_queued(self) -> bool:
        """Whether anything is in a queue."""
        return bool(self.steps or self.streams or self.opens or self.verifies.tasks or self.attends)

    @property
    def is_quiet(self) -> bool:
        """Whether nobody seems to decode, so that chunks may be large and follow each other."""
        return self._chunks >= QUIET_CHUNKS

    def is_runnable(self, task: StreamTask) -> bool:
        """Whether a stream may take a step more than are in flight: only a stop token, which
        nobody can foresee, and a cancel make one of them vain."""
        request = task.request
        left = min(AHEAD, request.credit, request.max_steps - task.steps)
        return task.end is None and task.ahead < min(left, self.slots.max_ctx - task.slot.length)

    def row(
        self, slot: Slot, pos: int, token: int, sampling: SamplingParams, extras: Extras,
        want_logits: bool = False,
    ) -> Row:  # fmt: skip
        """The row that appends a token at `pos`, on a page that the slot owns."""
        kv_row = slot.pages[pos // PAGE_SIZE] * self.page_rows + pos % PAGE_SIZE
        return token, slot.slot_id, pos + 1, kv_row, sampling, extras.top, want_logits

    def decode_plan(self) -> StepPlan | None:
        """Rows of all queued steps and runnable streams, and of verifications; None without any.
        Streams that got no page are left out, and put into `starved` when nothing in flight can
        give them one."""
        room = self.verifies.max_rows
        drafts = self._take_verifies() if self.verifies.tasks else ()
        for draft in drafts:
            room -= draft.rows
        steps, self.steps = self.steps[:room], self.steps[room:]
        tasks: list[StepRequest | StreamTask | VerifyTask] = [*steps]
        rows = [step.row for step in steps]
        if self.streams:
            self._add_streams(tasks, rows, room)
        for draft in drafts:
            tasks += [draft] * draft.rows
            rows += self._rows_of(draft)
        if not tasks:
            return None
        self._chunks = 0
        columns = zip(*rows, strict=True)
        token_ids, slot_idx, context_len, kv_row, sampling, tops, wants = columns
        logit_rows = [row for row, want in enumerate(wants) if want] if any(wants) else []
        plan = StepPlan(
            len(tasks), tasks, token_ids, slot_idx, context_len, kv_row, sampling, logit_rows,
            False, True, self.slots.changes.take(), scores_of_rows(tops) if any(tops) else None,
        )  # fmt: skip
        if steps:
            plan.queued_ns = self.steps_since_ns
        return plan

    def _add_streams(
        self, tasks: list[StepRequest | StreamTask | VerifyTask], rows: list[Row], room: int
    ) -> None:
        for stream in self.streams:
            if len(tasks) >= room:
                return
            if not self.is_runnable(stream):
                continue
            slot, ahead = stream.slot, stream.ahead
            pos = slot.length + ahead
            if not self._may_grow(stream, pos + 1):
                if not (ahead or self.slots.pool.num_waiting):
                    self.starved.append(stream)
                continue
            token = FED_TOKEN if ahead else stream.token
            rows.append(self.row(slot, pos, token, stream.sampling, stream.request.extras))
            tasks.append(stream)
            stream.ahead = ahead + 1

    def _take_verifies(self) -> list[VerifyTask]:
        """The verifications of the next step."""
        return self.verifies.take(len(self.steps) + sum(map(self.is_runnable, self.streams)))

    def _rows_of(self, draft: VerifyTask) -> list[Row]:
        request = draft.request
        return [
            self.row(draft.slot, pos, token, draft.sampling, request.extras)
            for pos, token in enumerate(draft.tokens, request.pos)
        ]

    def _may_grow(self, stream: StreamTask, length: int) -> bool:
        """Own pages for `length` tokens, but none that are promised to a prompt before it."""
        if length <= len(stream.slot.pages) * PAGE_SIZE:
            return True
        return self.room.has_page(stream.turn) and self._claim(stream, length)

    def _claim(self, task: StreamTask | OpenTask, length: int) -> bool:
        """Own pages for `length` tokens, or say no."""
        try:
            self.slots.extend(task.slot, length)
        except RequestRejected:
            return False
        return True

    def chunk_plan(self) -> StepPlan | None:
        """The next chunk of the oldest prompt; None while pages wait for launches in flight. Raises
        RequestRejected ("no_pages") with the prompt at the head of its queue."""
        task = self.opens[0]
        slot = task.slot
        self.sharing.reuse(task)  # others may have got on since it was admitted
        first = slot.length + task.ahead
        rows = self.prefill_chunk if self.is_quiet else self.prefill_rows
        end = min(first + rows, len(task.prompt))
        if self.slots.pool.num_waiting and not self._claim(task, end):
            return None
        self.slots.extend(slot, end)
        is_last = end == len(task.prompt)
        if is_last:
            self.opens.popleft()
        task.ahead += end - first
        queued_ns, task.queued_ns = task.queued_ns, 0
        self._chunks += 1
        pos = np.arange(first, end, dtype=np.int64)
        pages = self.slots.table[slot.slot_id, pos // PAGE_SIZE].astype(np.int64)
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
            changes=self.slots.changes.take(),
            scores=scores_of_last(task, end - first) if is_last else None,
            prompt_scores=scores_of_prompt(task, first, end),
            queued_ns=queued_ns,
        )

    def attend_plan(self) -> StepPlan:
        """The oldest rows of attention, and those of the same layer that fit beside them."""
        layer, room = self.attends[0].request.layer, self.verifies.max_rows
        tasks: list[AttendTask] = []
        others: list[AttendTask] = []
        for task in self.attends:
            if task.request.layer == layer and task.rows <= room:
                tasks.append(task)
                room -= task.rows
            else:
                others.append(task)
        self.attends = others
        slot_idx, context_len, kv_row = [], [], []
        for run in (run for task in tasks for run in task.runs):
            for pos in range(run.pos, run.pos + run.rows):
                place = run.slot.pages[pos // PAGE_SIZE] * self.page_rows + layer * PAGE_SIZE
                slot_idx.append(run.slot.slot_id)
                context_len.append(pos + 1)
                kv_row.append(-1 if run.is_repeated else place + pos % PAGE_SIZE)
        rows = len(slot_idx)
        return StepPlan(
            rows, tasks, [layer] * rows, slot_idx, context_len, kv_row, [],
            changes=self.slots.changes.take(), attends=tasks,
        )  # fmt: skip

    def drop(self, task: Task) -> bool:
        """Take a task out of its queue; whether it was in one."""
        if isinstance(task, StreamTask):
            return self.streams.pop(task, False) is None
        if isinstance(task, VerifyTask):
            return self.verifies.drop(task)
        queue: list[StepRequest] | list[AttendTask] | deque[OpenTask]
        queue = self.steps if isinstance(task, StepRequest) else self.opens
        if isinstance(task, AttendTask):
            queue = self.attends
        if task not in queue:
            return False
        queue.remove(task)  # type: ignore[arg-type]
        return True
