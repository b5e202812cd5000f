"""Admission: whether an operation may run. Each is looked at alone; a refusal changes nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from latentd.extras import NO_EXTRAS, PromptScores
from latentd.operations import OpenRequest
from latentd.plans import OpenTask, StreamTask
from latentd.token_checks import check_draft, next_token, prompt_ids
from latentd.verifying import VerifyTask
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.extras import Extras
    from latentd.operations import SamplingParams, StepRequest, StreamRequest, VerifyRequest
    from latentd.scheduler import Scheduler
    from latentd.sharing import Sharing
    from latentd.slots import Slot, SlotTable

T = TypeVar("T")


class Admission:
    """Turns asked-for operations into queued tasks, or raises RequestRejected."""

    def __init__(
        self, slots: SlotTable, sharing: Sharing, scheduler: Scheduler, vocab_size: int,
        settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """`settle` waits until nothing is in flight."""
        self.slots = slots
        self.sharing = sharing
        self.scheduler = scheduler
        self.room = scheduler.room
        self.vocab_size = vocab_size
        self.attend_only = False  # then nothing can be computed but attention
        self._settle = settle
        self._seats = dict(enumerate(slots.slots))

    def open(
        self, prompt: Sequence[int] | NDArray[np.int32], sampling: SamplingParams,
        want_logits: bool, salt: str, extras: Extras = NO_EXTRAS,
    ) -> OpenTask:  # fmt: skip
        """Seat a prompt, on pages that hold its beginning if there are any; an empty one is seated
        and not queued. Draws the seed if there is none."""
        token_ids = self.check_prompt(prompt, sampling)
        sampling = sampling.seeded()
        slot = self.slots.take(sampling)
        request = OpenRequest(
            slot.slot_id, slot.epoch, sampling, len(token_ids), want_logits, extras=extras
        )
        task = OpenTask(request, slot, token_ids, sampling, next(self.room.turns))
        if extras.prompt_top is not None:
            task.prompt_scores = PromptScores(len(token_ids), extras.prompt_top)
        self.sharing.begin(task, salt)
        try:
            self.room.check("the prompt", num_pages(len(token_ids)) - len(slot.pages))
        except RequestRejected:
            self.slots.free(slot)
            raise
        if extras.limits is not None:
            self.slots.limit(slot, extras.limits)
        if len(token_ids):
            slot.task = task
            self.scheduler.opens.append(task)
        return task

    def check_prompt(
        self, prompt: Sequence[int] | NDArray[np.int32], sampling: SamplingParams
    ) -> NDArray[np.int32]:
        """The ids of a prompt that could be opened if there were room. Raises RequestRejected."""
        token_ids = prompt_ids(prompt, self.vocab_size)
        if len(token_ids):
            self.check_decodes()
        sampling.validate()
        limit = self.slots.max_ctx - 1
        if len(token_ids) > limit:
            raise RequestRejected(
                "context_full",
                f"the prompt has {len(token_ids)} tokens; at most {limit} fit beside one step "
                f"(max_ctx {self.slots.max_ctx})",
                max_ctx=self.slots.max_ctx,
            )
        self.room.check_size("the prompt", num_pages(len(token_ids)))
        return token_ids

    def step(
        self, request: StepRequest, token: int | None, sampling: SamplingParams | None
    ) -> None:
        """Queue one row and claim its page."""
        if self.attend_only:
            self.check_decodes()
        slot_id, epoch, pos = request.slot_id, request.epoch, request.pos
        slot = self._seats.get(slot_id)
        if (
            slot is None or slot.epoch != epoch or not epoch or slot.task is not None
            or slot.length != pos or pos >= self.slots.max_ctx
        ):  # fmt: skip
            slot = self.ready_slot(slot_id, epoch, pos)  # says why it is not
        if token is None or not 0 <= token < self.vocab_size:
            token = next_token(slot, token, self.vocab_size)
        before = slot.sampling
        params = before if sampling is None else self._sampling(slot, sampling)
        assert params is not None
        if slot.borrowed or pos >= len(slot.pages) * PAGE_SIZE:
            self.claim(slot, pos + 1)
        extras = request.extras
        request.slot, request.before = slot, before
        request.row = self.scheduler.row(slot, pos, token, params, extras, request.want_logits)
        slot.task, slot.sampling = request, params
        if slot.limits is not extras.limits and slot.limits != extras.limits:
            self.slots.limit(slot, extras.limits)
        steps = self.scheduler.steps
        if not steps:
            self.scheduler.steps_since_ns = time.perf_counter_ns()
        steps.append(request)

    def stream(
        self, request: StreamRequest, token: int | None, sampling: SamplingParams | None
    ) -> None:
        """Queue a stream and claim the page of its first step."""
        self.check_decodes()
        slot = self.ready_slot(request.slot_id, request.epoch, request.pos)
        token = next_token(slot, token, self.vocab_size)
        if request.max_steps < 1:
            text = f"max_steps is {request.max_steps}, must be at least 1"
            raise RequestRejected("invalid", text)
        if request.credit < 0:
            raise RequestRejected("invalid", f"credit is {request.credit}, must be at least 0")
        params = self._sampling(slot, sampling)
        self.claim(slot, request.pos + 1)
        task = StreamTask(request, slot, params, token, next(self.room.turns), slot.sampling)
        task.tail.extend(request.before)
        self._start(slot, task)
        self.scheduler.streams[task] = None

    def verify(
        self, request: VerifyRequest, token: int | None, sampling: SamplingParams | None
    ) -> None:
        """Queue the rows of a draft and claim their pages."""
        self.check_decodes()
        slot = self.ready_slot(request.slot_id, request.epoch, request.pos)
        token = next_token(slot, token, self.vocab_size)
        most = self.scheduler.verifies.max_rows - 1
        check_draft(request, self.vocab_size, most, self.slots.max_ctx)
        params = self._sampling(slot, sampling)
        task = VerifyTask(request, slot, params, token, slot.sampling)
        self.claim(slot, request.pos + task.rows)
        self._start(slot, task)
        self.scheduler.verifies.append(task)

    def _start(self, slot: Slot, task: StreamTask | VerifyTask) -> None:
        """Let the slot run a task, with what that asks of it."""
        slot.task, slot.sampling, limits = task, task.sampling, task.request.extras.limits
        if slot.limits != limits:
            self.slots.limit(slot, limits)

    def claim(self, slot: Slot, length: int) -> None:
        """Own pages for `length` tokens, and alone the one that is appended to. Raises
        RequestRejected("no_pages")."""
        missing = num_pages(length) - len(slot.pages)
        if missing > 0:
            self.room.check(f"slot {slot.slot_id}", missing)

        def take() -> None:
            if slot.borrowed:
                self.sharing.own(slot)
            self.slots.extend(slot, length)

        self.patiently(take)

    def patiently(self, take: Callable[[], T]) -> T:
        """What takes pages; where some only wait for launches in flight, after those."""
        try:
            return take()
        except RequestRejected:
            if not self.slots.pool.num_waiting:
                raise
            self._settle()
            return take()

    def check_decodes(self) -> None:
        """Raise RequestRejected("unsupported") where there are no weights but those of attend."""
        if self.attend_only:
            text = "this daemon serves attend only: open empty slots, and run the rest yourself"
            raise RequestRejected("unsupported", text)

    def idle_slot(self, slot_id: int, epoch: int, pos: int) -> Slot:
        """The slot, if nothing runs on it and it has exactly `pos` tokens."""
        slot = self.slots.get(slot_id, epoch)
        if slot.task is not None:
            raise RequestRejected("busy", f"slot {slot_id} already runs an operation")
        if pos != slot.length:
            raise RequestRejected(
                "position_conflict",
                f"slot {slot_id} has {slot.length} tokens, the request expects {pos}",
                context_len=slot.length,
            )
        return slot

    def ready_slot(self, slot_id: int, epoch: int, pos: int) -> Slot:
        """The slot, if it is idle at `pos` and may take one more token."""
        slot = self.idle_slot(slot_id, epoch, pos)
        if pos >= self.slots.max_ctx:
            raise RequestRejected(
                "context_full",
                f"slot {slot_id} holds {pos} tokens, the limit (max_ctx) is {self.slots.max_ctx}; "
                "truncate or close it",
                max_ctx=self.slots.max_ctx,
            )
        return slot

    @staticmethod
    def _sampling(slot: Slot, sampling: SamplingParams | None) -> SamplingParams:
        """The parameters from one request on; without a seed the slot's own is used."""
        assert slot.sampling is not None
        if sampling is None:
            return slot.sampling
        sampling.validate()
        if sampling.seed is None:
            return replace(sampling, seed=slot.sampling.seed)
        return sampling
