"""The engine as the server sees it.

The engine runs on one thread. `admit_*` either returns a request that is now queued, or raises
RequestRejected and changes nothing. `launch()` keeps the device busy with replays of all runnable
rows and prompt chunks, `finish()` returns what completed; the device works between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from latentd.extras import NO_EXTRAS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.attending import AttendRequest, Bits
    from latentd.engine_figures import EngineFigures
    from latentd.engine_transfer import Transfers
    from latentd.extras import Extras
    from latentd.operations import (
        Event,
        Failed,
        ModelInfo,
        OpenRequest,
        Reason,
        Request,
        SamplingParams,
        SlotState,
        StepRequest,
        StreamRequest,
        VerifyRequest,
    )
    from latentd.room import RoomLeft


class EngineProtocol(Protocol):
    """The engine as the server sees it; tests pass a fake."""

    info: ModelInfo
    transfers: Transfers
    """Pages out of slots and into new ones."""

    def admit_open(
        self,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        want_logits: bool,
        salt: str = "",
        extras: Extras = NO_EXTRAS,
    ) -> OpenRequest:
        """Take a slot for a prompt, which begins on pages of prompts of the same salt if it can.
        Refuses: no_slot, no_pages, context_full, invalid (a token id out of range, bad sampling).
        An empty prompt completes at once with context_len 0."""

    def check_open(self, prompt: NDArray[np.int32], sampling: SamplingParams) -> None:
        """Refuses what `admit_open` would whatever there is room for: context_full, too_large,
        invalid."""

    def admit_step(
        self, request: StepRequest, token: int | None, sampling: SamplingParams | None
    ) -> StepRequest:
        """Queue one row. token None appends the last sampled one; `sampling` holds from this step
        on. The request itself is the event of its end. Refuses: epoch_gone, position_conflict
        (detail context_len), busy, context_full, no_pages, invalid."""

    def admit_stream(
        self, request: StreamRequest, token: int | None, sampling: SamplingParams | None
    ) -> StreamRequest:
        """Queue a stream that begins with `token` (None: the last sampled one); refuses like
        admit_step."""

    def admit_verify(
        self, request: VerifyRequest, token: int | None, sampling: SamplingParams | None
    ) -> VerifyRequest:
        """Queue a row for `token` (None: the last sampled one) and one for each token of the draft;
        refuses like admit_step."""

    def admit_attend(
        self, layer: int, rows: Sequence[tuple[int, int, int]], q: Bits, latent: Bits
    ) -> AttendRequest:
        """Queue attention of one layer for rows (slot_id, epoch, pos); q [rows, heads, nope + 64]
        and latent [rows, 576], normed and rotated. Refuses like admit_step, all rows or none;
        detail `row` is the index of the one that may not run."""

    def add_credit(self, stream: StreamRequest, n: int) -> None:
        """Let a stream produce n more tokens, or with a negative n fewer than it might."""

    def cancel(self, request: Request, reason: Reason = "cancelled") -> Failed | None:
        """Stop a request; the event still comes, and is returned if it is one of failing. An open
        fails with `reason` (its slot is freed), and so do a step, verification or attention that
        is not launched, and a stream with the reason "deadline" if nothing of it is: they leave
        their slot as it was before. Else a stream's `end` is `reason`, and what is launched of it
        is committed. What is launched, a stream that has begun when its time is over, and what has
        completed is left as it is."""

    def truncate(self, slot_id: int, epoch: int, pos: int, to: int) -> int:
        """Drop all tokens from position `to` on; returns the new length. The last sampled token
        is forgotten. Refuses: epoch_gone, position_conflict, busy, invalid."""

    def fork(
        self, slot_id: int, epoch: int, pos: int, sampling: SamplingParams | None
    ) -> SlotState:
        """Make a slot with the same tokens; `sampling` None keeps that of the source, seed and
        all, and without a seed one is drawn. Refuses: no_slot, no_pages, epoch_gone,
        position_conflict, busy, invalid."""

    def close(self, slot_id: int, epoch: int) -> None:
        """Free the slot, its pages and its epoch; a running request on it ends as "closed".
        Refuses: epoch_gone."""

    def slot(self, slot_id: int, epoch: int) -> SlotState:
        """The slot's state. Refuses: epoch_gone."""

    @property
    def room(self) -> RoomLeft:
        """What a newcomer can have."""

    @property
    def has_work(self) -> bool:
        """Whether run() would do something."""

    @property
    def may_wait(self) -> bool:
        """Whether the next launch may wait a little for more rows: the device is at work on the
        one before it, or only single steps are queued."""

    def launch(self) -> None:
        """Start replays of all runnable rows and prompt chunks, up to two in flight. It does not
        wait: what the caller does before `finish` costs nothing while the device works."""

    def finish(self) -> list[Event]:
        """Wait for the oldest launch, commit it and what else is done by then, and return all that
        has completed."""

    def run(self) -> list[Event]:
        """Launch and finish."""

    def on_long_wait(self, call: Callable[[], None]) -> None:
        """Have something called again and again while a wait for the device lasts."""

    def figures(self) -> EngineFigures:
        """Counters, gauges, times and the last launches, as they are now."""
