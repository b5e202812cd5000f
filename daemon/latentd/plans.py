"""What runs and what came of it: admitted tasks, the plan of one launch, its outputs, a backend.

Plain Python and numpy. A plan holds everything that is staged; how it runs is the backend's
business.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from latentd.attending import AttendTask
from latentd.changes import NO_CHANGES, Changes
from latentd.operations import StepRequest
from latentd.verifying import VerifyTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.attending import Bits
    from latentd.changes import Moves
    from latentd.extras import PromptScores, Scores, Top
    from latentd.operations import OpenRequest, SamplingParams, StreamRequest
    from latentd.scoring import ScorePlan
    from latentd.slots import Slot


@dataclass(eq=False, slots=True)
class StreamTask:
    """A running stream. `token` is appended next, unless rows are on their way; `ahead` rows are
    launched and not committed, behind the slot's length. With `end` set no more are launched: it
    ends so when they are committed. `turn`: see `Room`; `before`: as in a step. `tail`: its last
    tokens, for stop sequences."""

    request: StreamRequest
    slot: Slot
    sampling: SamplingParams
    token: int
    turn: int
    before: SamplingParams | None
    steps: int = 0
    ahead: int = 0
    end: str | None = None
    tail: deque[int] = field(default_factory=deque)

    def meets_stop(self, token: int) -> bool:
        """Whether the stream stops with this token, its next one."""
        request = self.request
        if token in request.stop:
            return True
        if not request.stop_sequences:
            return False
        self.tail.append(token)
        if len(self.tail) > max(map(len, request.stop_sequences)):
            self.tail.popleft()
        tail = tuple(self.tail)
        return any(tail[-len(ids) :] == ids for ids in request.stop_sequences)


@dataclass(eq=False, slots=True)
class OpenTask:
    """A prompt on its way in; slot.length tells how much of it is committed, and `ahead` rows
    behind that are launched. `turn`: see `Room`."""

    request: OpenRequest
    slot: Slot
    prompt: NDArray[np.int32]
    sampling: SamplingParams
    turn: int
    ahead: int = 0
    prompt_scores: PromptScores | None = None
    queued_ns: int = field(default_factory=time.perf_counter_ns)  # 0 once a chunk of it is planned


FED_TOKEN: Final = -1
"""The token id of a row that goes on with the one that its slot samples in the launch before."""

Task = StepRequest | StreamTask | OpenTask | VerifyTask | AttendTask


@dataclass(slots=True)
class StepPlan:
    """Rows of one launch. The columns have `rows` entries each; decode rows have a task and
    sampling each, the rows of a prompt chunk share one. `logit_rows` are output rows; `scores` are
    of rows whose token is sampled, `prompt_scores` of rows of a chunk. `changes` come before. With
    `attends` the rows are those of attention that clients have sent: a token id is the layer, and
    nothing is sampled."""

    rows: int
    tasks: Sequence[Task]
    token_ids: Sequence[int] | NDArray[np.int32]
    slot_idx: Sequence[int] | int
    context_len: Sequence[int] | NDArray[np.int32]
    kv_row: Sequence[int] | NDArray[np.int64]
    sampling: Sequence[SamplingParams]
    logit_rows: list[int] = field(default_factory=list)
    is_chunk: bool = False
    is_last: bool = True  # false for a chunk whose prompt goes on: nothing is sampled
    changes: Changes = NO_CHANGES
    scores: ScorePlan | None = None
    prompt_scores: ScorePlan | None = None
    attends: list[AttendTask] = field(default_factory=list)  # then it has no other rows
    queued_ns: int = 0  # since when the first of its steps has waited, or the prompt it begins


@dataclass(slots=True)
class StepOutputs:
    """What a completed plan produced, by output row (decode: the row; last chunk: row 0), and
    when it ran, by the device's clock. Scores are those that it asked for."""

    tokens: list[int]
    logprobs: list[float]
    logits: dict[int, NDArray[np.float32]]
    start_ns: int
    end_ns: int
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    attended: Bits | None = None  # [rows, heads * v]

    def top(self, plan: StepPlan, row: int) -> Top | None:
        """What an output row asked for beside its token."""
        task, scores = plan.tasks[0 if plan.is_chunk else row], self.scores
        assert not isinstance(task, AttendTask)
        count = task.request.extras.top
        if scores is None or plan.scores is None or not count:
            return None
        return scores.top(0 if plan.is_chunk else row - plan.scores.first, count)

    @property
    def device_us(self) -> float:
        """The time that it took the device."""
        return (self.end_ns - self.start_ns) / 1e3


class Backend(Protocol):
    """Runs plans on a device, in order. At most two are in flight, and none behind one
    whose `logit_rows` are still to be read. `eager`: decode plans run without graphs.
    `graph_replays` counts plans that were replays of graphs, `graph_fallbacks` those that a device
    with graphs ran without. `on_long_wait` is called again and again in a wait for a device that
    takes its time."""

    eager: bool
    graph_replays: int
    graph_fallbacks: int
    on_long_wait: Callable[[], None]

    def launch(self, plan: StepPlan, bucket: int) -> None:
        """Stage the plan and start it. `bucket` rows run (the rest is padding)."""

    def wait(self) -> StepOutputs:
        """Wait for the oldest launch. Raises DeviceFault when the device failed."""

    def is_done(self) -> bool:
        """Whether wait() would find the oldest launch completed."""

    def move(self, moves: Moves) -> None:
        """Make moves outside a plan, while nothing is in flight. Raises DeviceFault."""

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of pages, [pages, bytes of a page]: a copy. Called while nothing is in flight.
        Raises DeviceFault."""

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Fill pages behind all that is in flight; launches to come see it. `data` has been read on
        return. Raises DeviceFault."""
