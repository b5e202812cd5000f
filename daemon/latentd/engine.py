"""The engine: operations on slots, admitted here, run in launches and reported as events.

It implements `EngineProtocol` over any `Backend` and knows no torch, no device and no socket.
The life of an operation: admit (refused, or queued as a task) -> plan -> launch -> wait -> commit
(the slot changes) -> event. Streams and prompts run ahead of what is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latentd.engine_admission import Admission
from latentd.engine_attend import Attends
from latentd.engine_branches import Branches
from latentd.engine_cancels import Cancels
from latentd.engine_launches import MAX_IN_FLIGHT, Launches
from latentd.engine_stats import EngineStats
from latentd.engine_transfer import Transfers
from latentd.extras import NO_EXTRAS
from latentd.operations import OpenDone, SlotState
from latentd.prefix_cache import PrefixCache
from latentd.scheduler import Scheduler
from latentd.sharing import Sharing
from latentd.startup import StartupReport
from latentd.verifying import VerifyQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.attending import AttendRequest, Bits
    from latentd.engine_figures import EngineFigures
    from latentd.extras import Extras
    from latentd.operations import (
        Event,
        Failed,
        ModelInfo,
        OpenRequest,
        Reason,
        Request,
        SamplingParams,
        StepRequest,
        StreamRequest,
        VerifyRequest,
    )
    from latentd.plans import Backend
    from latentd.room import RoomLeft
    from latentd.slots import SlotTable


class Engine:
    """Slots, queues and launches of one model. All methods belong to one thread."""

    def __init__(
        self,
        info: ModelInfo,
        slots: SlotTable,
        backend: Backend,
        prefill_chunk: int,
        prefill_rows: int = 0,
        startup: StartupReport | None = None,
    ) -> None:
        """`info.layers` owns the page geometry; `slots` has its pool; `backend` runs plans of up
        to max(info.buckets) decode rows or `prefill_chunk` prompt rows, of which at most
        `prefill_rows` (0: all) while others decode."""
        self.info = info
        self.startup = startup or StartupReport()
        self.slots = slots
        self.backend = backend
        page_rows = info.layers * info.page_size
        prefill_rows = min(prefill_rows or prefill_chunk, prefill_chunk)
        self.sharing = Sharing(slots)
        self.scheduler = Scheduler(
            slots, self.sharing, page_rows, prefill_chunk, prefill_rows,
            VerifyQueue(info.buckets[-1]),
        )  # fmt: skip
        self.counters = EngineStats(info.buckets)
        self.launches = Launches(slots, self.scheduler, backend, info.buckets, self.counters)
        self.admission = Admission(
            slots, self.sharing, self.scheduler, info.vocab_size, self.launches.settle
        )
        self.admission.attend_only = info.attend_only
        self.cancels = Cancels(slots, self.launches)
        self.branches = Branches(slots, self.sharing, self.admission)
        self.attends = Attends(info, slots, self.admission, self.scheduler)
        self.transfers = Transfers(
            info, slots, self.sharing, self.admission, backend, self.launches.settle
        )

    def cache_prefixes(self) -> None:
        """From now on keep full pages for prompts that begin in the same way."""
        self.sharing.cache = PrefixCache(self.slots, self.info.fingerprint)

    def admit_open(
        self, prompt: Sequence[int] | NDArray[np.int32], sampling: SamplingParams,
        want_logits: bool, salt: str = "", extras: Extras = NO_EXTRAS,
    ) -> OpenRequest:  # fmt: skip
        """See EngineProtocol."""
        self.transfers.relieve()
        task = self.admission.open(prompt, sampling, want_logits, salt, extras)
        self.counters.opens += 1
        if not len(task.prompt):
            self.launches.commits.events.append(
                OpenDone(task.request, 0, None, None, None, None, task.prompt_scores)
            )
        return task.request

    def check_open(self, prompt: NDArray[np.int32], sampling: SamplingParams) -> None:
        """See EngineProtocol."""
        self.admission.check_prompt(prompt, sampling)

    def admit_step(
        self, request: StepRequest, token: int | None, sampling: SamplingParams | None
    ) -> StepRequest:
        """See EngineProtocol. A `sampling` without a seed keeps the slot's."""
        self.admission.step(request, token, sampling)
        return request

    def admit_stream(
        self, request: StreamRequest, token: int | None, sampling: SamplingParams | None
    ) -> StreamRequest:
        """See EngineProtocol."""
        self.admission.stream(request, token, sampling)
        return request

    def admit_verify(
        self, request: VerifyRequest, token: int | None, sampling: SamplingParams | None
    ) -> VerifyRequest:
        """See EngineProtocol."""
        self.admission.verify(request, token, sampling)
        return request

    def admit_attend(
        self, layer: int, rows: Sequence[tuple[int, int, int]], q: Bits, latent: Bits
    ) -> AttendRequest:
        """See EngineProtocol."""
        return self.attends.admit(layer, rows, q, latent)

    def add_credit(self, stream: StreamRequest, n: int) -> None:
        """See EngineProtocol. A stream that has ended ignores it."""
        stream.credit += n

    def cancel(self, request: Request, reason: Reason = "cancelled") -> Failed | None:
        """See EngineProtocol."""
        return self.cancels.cancel(request, reason)

    def truncate(self, slot_id: int, epoch: int, pos: int, to: int) -> int:
        """See EngineProtocol."""
        return self.branches.truncate(slot_id, epoch, pos, to)

    def fork(
        self, slot_id: int, epoch: int, pos: int, sampling: SamplingParams | None
    ) -> SlotState:
        """See EngineProtocol."""
        self.transfers.relieve()
        slot = self.branches.fork(slot_id, epoch, pos, sampling)
        self.counters.forks += 1
        return self.slot(slot.slot_id, slot.epoch)

    def close(self, slot_id: int, epoch: int) -> None:
        """See EngineProtocol. A step that is not launched ends as Failed("epoch_gone")."""
        slot = self.slots.get(slot_id, epoch)
        self.launches.end(slot, "closed", "epoch_gone", f"slot {slot_id} was closed")
        self.slots.free(slot)

    def slot(self, slot_id: int, epoch: int) -> SlotState:
        """See EngineProtocol."""
        slot = self.slots.get(slot_id, epoch)
        assert slot.sampling is not None
        seed = slot.sampling.seed or 0  # admission has drawn one
        return SlotState(slot_id, epoch, slot.length, slot.token, slot.task is not None, seed)

    @property
    def has_work(self) -> bool:
        """Whether run() would do something."""
        launches = self.launches
        return bool(launches.in_flight or launches.commits.events) or self.scheduler.has_rows

    @property
    def may_wait(self) -> bool:
        """See EngineProtocol."""
        launches, scheduler = self.launches, self.scheduler
        if launches.commits.events or len(launches.in_flight) >= MAX_IN_FLIGHT:
            return False
        others = (
            scheduler.streams or scheduler.opens or scheduler.verifies.tasks or scheduler.attends
        )
        return bool(launches.in_flight) or bool(scheduler.steps and not others)

    def launch(self) -> None:
        """See EngineProtocol. Raises DeviceFault."""
        self.launches.launch()

    def finish(self) -> list[Event]:
        """See EngineProtocol. Raises DeviceFault."""
        launches = self.launches
        if launches.in_flight:
            launches.finish()
        return launches.take_events()

    def run(self) -> list[Event]:
        """See EngineProtocol. Raises DeviceFault."""
        self.launch()
        return self.finish()

    @property
    def room(self) -> RoomLeft:
        """See EngineProtocol."""
        return self.scheduler.room.left

    def on_long_wait(self, call: Callable[[], None]) -> None:
        """See EngineProtocol."""
        self.backend.on_long_wait = call

    def figures(self) -> EngineFigures:
        """See EngineProtocol."""
        pool = self.slots.pool
        gauges: dict[str, object] = {
            "kv_pages_total": pool.num_pages,
            "kv_pages_used": pool.num_used,
            "kv_pages_cached": pool.num_idle,
            "kv_pages_evicted": pool.num_evicted,
            "slots_total": self.slots.max_slots,
            "slots_used": self.slots.num_used,
            "streams": len(self.scheduler.streams),
            "prompts_queued": len(self.scheduler.opens),
            "pages_exported": self.transfers.pages_exported,
            "slots_adopted": self.transfers.slots_adopted,
            "steps_queued": len(self.scheduler.steps),
            "graph_replays": self.backend.graph_replays,
            "graph_fallbacks": self.backend.graph_fallbacks,
        }
        return self.counters.snapshot(gauges)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; times in microseconds over the last 1024 steps of each bucket."""
        return self.figures().stats()

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.counters.reset()
        self.backend.graph_replays = self.backend.graph_fallbacks = 0
