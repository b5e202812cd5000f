"""Attention for clients: whether a request may run, and what its completion changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from latentd.attending import (
    Attended,
    AttendRequest,
    AttendTask,
    Run,
    are_finite,
    digest_of,
    ends_behind,
    note_written,
)
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE, ROPE_DIM, ROW_DIM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.attending import Bits
    from latentd.engine_admission import Admission
    from latentd.operations import ModelInfo
    from latentd.scheduler import Scheduler
    from latentd.slots import Slot, SlotTable

UNKNOWN = -1
"""What a slot's tokens are where only the client knows them."""


class Attends:
    """Turns asked-for attention into queued tasks, or raises RequestRejected and changes
    nothing."""

    def __init__(
        self, info: ModelInfo, slots: SlotTable, admission: Admission, scheduler: Scheduler
    ) -> None:
        self.info = info
        self.slots = slots
        self.admission = admission
        self.scheduler = scheduler
        self.dtype = np.dtype(np.uint16 if info.dtype == "bfloat16" else np.float32)

    def admit(
        self, layer: int, rows: Sequence[tuple[int, int, int]], q: Bits, latent: Bits
    ) -> AttendRequest:
        """Queue rows of one layer and claim their pages. Refuses: invalid, epoch_gone, busy,
        position_conflict, context_full, no_pages; with the index of a row in detail `row`."""
        self._check(layer, rows, q, latent)
        request = AttendRequest(layer, tuple(rows), q, latent)
        is_last = layer == self.info.layers - 1
        runs = [self._run(request, first, count) for first, count in _runs(request.rows)]
        self._claim(runs)
        task = AttendTask(request, runs, is_last)
        for run in runs:
            run.slot.task = task
            if not run.is_repeated:
                run.slot.chain.clear()  # its tokens are nobody's but the client's: not for others
        self.scheduler.attends.append(task)
        return request

    def _check(
        self, layer: int, rows: Sequence[tuple[int, int, int]], q: Bits, latent: Bits
    ) -> None:
        info, most = self.info, self.info.buckets[-1]
        if not 0 <= layer < info.layers:
            raise _invalid("layer", f"is {layer}, must be 0 to {info.layers - 1}")
        if not 1 <= len(rows) <= most:
            raise _invalid("rows", f"are {len(rows)}, must be 1 to {most}")
        for name, given, shape in (
            ("q", q, (len(rows), info.heads, info.nope_dim + ROPE_DIM)),
            ("latent", latent, (len(rows), ROW_DIM)),
        ):
            if given.dtype != self.dtype or given.shape != shape:
                dtype = "bfloat16" if given.dtype == np.uint16 else given.dtype.name
                text = f"is {dtype} {list(given.shape)}, must be {info.dtype} {list(shape)}"
                raise _invalid(name, text)
        if not are_finite(latent):
            raise _invalid("latent", "holds NaN or infinity, which would stay in the slot")

    def _run(self, request: AttendRequest, first: int, count: int) -> Run:
        """The rows of one slot, looked at."""
        slot_id, epoch, pos = request.rows[first]
        try:
            slot = self.slots.get(slot_id, epoch)
            if slot.task is not None:
                raise RequestRejected("busy", f"slot {slot_id} already runs an operation")
            if pos != slot.length and self._repeats(slot, request, first, count):
                return Run(slot, first, count, pos, True)
            self.admission.idle_slot(slot_id, epoch, pos)
            _check_order(slot, request.layer, pos + count)
            if pos + count > self.slots.max_ctx:
                self.admission.ready_slot(slot_id, epoch, pos)
                text = f"slot {slot_id} would hold {pos + count} tokens"
                text += f", the limit (max_ctx) is {self.slots.max_ctx}"
                raise RequestRejected("context_full", text, max_ctx=self.slots.max_ctx)
        except RequestRejected as refusal:
            text = f"row {first} of {len(request.rows)}: {refusal}"
            raise RequestRejected(refusal.code, text, **refusal.detail, row=first) from None
        return Run(slot, first, count, pos, False)

    def _repeats(self, slot: Slot, request: AttendRequest, first: int, count: int) -> bool:
        """Whether these rows are those that have completed the slot's last positions."""
        pos, attended = request.rows[first][2], slot.attended
        if attended is None or request.layer != self.info.layers - 1:
            return False
        if pos != attended.first or pos + count != slot.length:
            return False
        return digest_of(request.latent[first : first + count]) == attended.digest

    def _claim(self, runs: list[Run]) -> None:
        """Own all pages, or none more than before."""
        taken: list[tuple[Slot, int]] = []
        try:
            for run in runs:
                if not run.is_repeated:
                    taken.append((run.slot, len(run.slot.pages)))
                    self.admission.claim(run.slot, run.pos + run.rows)
        except RequestRejected as refusal:
            for slot, pages in taken:
                self.slots.cut(slot, max(slot.length, pages * PAGE_SIZE))
            text = f"row {run.first}: {refusal}"
            raise RequestRejected(refusal.code, text, **refusal.detail, row=run.first) from None

    @staticmethod
    def commit(task: AttendTask) -> list[int]:
        """Take note of a completed task; the length of each row's slot behind it."""
        lengths: list[int] = []
        for run in task.runs:
            slot = run.slot
            length = run.pos + run.rows if task.is_last or run.is_repeated else run.pos
            lengths += [length] * run.rows
            if slot.task is not task:
                continue
            slot.task = None
            if run.is_repeated:
                continue
            if task.is_last:
                slot.tokens[run.pos : length] = np.full(run.rows, UNKNOWN, np.int32).data
                slot.length, slot.token = length, None
                latent = task.request.latent[run.first : run.first + run.rows]
                slot.attended = Attended(run.pos, digest_of(latent))
            else:
                note_written(slot, task.request.layer, run.pos + run.rows)
        return lengths


def _check_order(slot: Slot, layer: int, end: int) -> None:
    """Refuse a layer in front of which one was skipped: that would hold zeros for ever."""
    ends = ends_behind(slot)
    if not layer or (layer <= len(ends) and ends[layer - 1] >= end):
        return
    missing = next((i for i, stop in enumerate(ends) if stop < end), len(ends))
    pos = max([slot.length, *ends[missing : missing + 1]])
    text = f"layer {layer} of slot {slot.slot_id} came before layer {missing}, of which position "
    text += f"{pos} is not there yet; send the layers in order, from 0 on"
    raise RequestRejected("position_conflict", text, context_len=slot.length, layer=missing)


def _runs(rows: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """First row and number of each run of one slot's rows, whose positions count up."""
    runs: list[tuple[int, int]] = []
    seen: set[int] = set()
    for index, (slot_id, epoch, pos) in enumerate(rows):
        if index and (slot_id, epoch) == rows[index - 1][:2]:
            if pos != rows[index - 1][2] + 1:
                text = f"[{index}] is of position {pos}, behind {rows[index - 1][2]} of its slot"
                raise _invalid("rows", text)
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        elif slot_id in seen:
            raise _invalid("rows", "of one slot must stand together")
        else:
            runs.append((index, 1))
            seen.add(slot_id)
    return runs


def _invalid(field: str, what: str) -> RequestRejected:
    return RequestRejected("invalid", f"attend: field {field} {what}")
