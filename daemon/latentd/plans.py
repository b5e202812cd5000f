"""What runs and what came of it: admitted tasks, the plan of one launch, its outputs, a backend.

Plain Python and numpy. A plan holds everything that is staged; how it runs is the backend's
business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from latentd.operations import StepRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.operations import OpenRequest, SamplingParams, StreamRequest
    from latentd.slots import Moves, Slot, Update


@dataclass(eq=False, slots=True)
class StepTask(StepRequest):
    """One admitted step: the request itself and what it was granted; its page is claimed."""

    slot: Slot
    token: int
    sampling: SamplingParams

    @property
    def request(self) -> StepRequest:
        """As the other tasks have it."""
        return self


@dataclass(eq=False, slots=True)
class StreamTask:
    """A running stream. `in_flight`: a row of it is launched and not committed."""

    request: StreamRequest
    slot: Slot
    sampling: SamplingParams
    steps: int = 0
    in_flight: bool = False


@dataclass(eq=False, slots=True)
class OpenTask:
    """A prompt on its way in; slot.length tells how much of it is committed."""

    request: OpenRequest
    slot: Slot
    prompt: NDArray[np.int32]
    sampling: SamplingParams
    in_flight: bool = False


Task = StepTask | StreamTask | OpenTask


@dataclass(slots=True)
class StepPlan:
    """Rows of one launch. The columns have `rows` entries each; decode rows have a task and
    sampling each, the rows of a prompt chunk share one. `logit_rows` are output rows."""

    rows: int
    tasks: Sequence[Task]
    token_ids: Sequence[int] | NDArray[np.int32]
    slot_idx: Sequence[int] | int
    context_len: Sequence[int] | NDArray[np.int32]
    kv_row: Sequence[int] | NDArray[np.int64]
    sampling: list[SamplingParams]
    logit_rows: list[int] = field(default_factory=list)
    is_chunk: bool = False
    is_last: bool = True  # false for a chunk whose prompt goes on: nothing is sampled
    updates: list[Update] = field(default_factory=list)
    zero_pages: list[int] = field(default_factory=list)
    moves: Moves | None = None  # before the updates


@dataclass(slots=True)
class StepOutputs:
    """What a completed plan produced, by output row (decode: the row; last chunk: row 0)."""

    tokens: list[int]
    logprobs: list[float]
    logits: dict[int, NDArray[np.float32]]
    device_us: float


class Backend(Protocol):
    """Runs plans on a device, in order. At most two are in flight, and none behind one
    whose `logit_rows` are still to be read. `eager`: decode plans run without graphs.
    `on_long_wait` is called again and again in a wait for a device that takes its time."""

    eager: bool
    on_long_wait: Callable[[], None]

    def launch(self, plan: StepPlan, bucket: int) -> None:
        """Stage the plan and start it. `bucket` rows run (the rest is padding)."""

    def wait(self) -> StepOutputs:
        """Wait for the oldest launch. Raises DeviceFault when the device failed."""
