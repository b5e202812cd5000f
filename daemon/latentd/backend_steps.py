"""Steps of a model over static buffers: what both backends share, and the cpu backend.

A backend stages plans into the ring, runs `decode_step` or `prompt_chunk` for each in order, and
reads back the entry's outputs. It knows nothing of slots and requests.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from latentd.attend_desk import AttendDesk
from latentd.model.attend_step import AttendModel, AttendStep
from latentd.model.forward import decode_step, prompt_chunk
from latentd.plans import StepOutputs, StepPlan
from latentd.scoring import ScoreDesk
from latentd.stager import Stager
from latentd_kernels.limits import NO_LIMITS, SeatLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.buffers import StepBuffers
    from latentd.changes import Moves
    from latentd.limits import Limits
    from latentd.model.forward import Model
    from latentd_kernels.ops import Ops, StepInputs


class StepRunner:
    """Numbers, stages and runs steps. `launched` steps were staged, `completed` read back."""

    def __init__(
        self, model: Model, ops: Ops, buffers: StepBuffers,
        of_inputs: Callable[[StepInputs], Ops],
    ) -> None:  # fmt: skip
        """`of_inputs` makes operations like `ops` over other inputs."""
        self.model = model
        self.ops = ops
        self.buffers = buffers
        self.launched = 0
        self.completed = 0
        ring = buffers.ring
        self._stagers = [Stager(ring.entry(idx)) for idx in range(ring.layout.entries)]
        self._scores = ScoreDesk(ring.scores)
        b, kv_b = buffers, tuple(layer.attention.kv_b for layer in model.weights.layers)
        attend = AttendModel.of(model.config, kv_b)
        self._attend = AttendStep(attend, ops, of_inputs, b.attend, b.workspace, b.slab)
        self._attend_desk = AttendDesk(b.attend)

    def stage(self, plan: StepPlan, bucket: int) -> None:
        """Write the plan into the next ring entry."""
        step = self.launched
        if plan.attends:
            self._attend_desk.stage(plan.attends, step)
        self._stagers[step % len(self._stagers)].stage(plan, bucket)
        for asked in (plan.scores, plan.prompt_scores):
            if asked is not None:
                self._scores.stage(asked, step)
        self.launched += 1

    def place_limits(self, plan: StepPlan, step: int) -> None:
        """In front of step number `step`: give slots the limits that its plan names, if any."""
        if plan.changes.limits:
            ring = self.buffers.ring.limits
            assert ring is not None
            ring.write(step, [(slot, seat_limits(limits)) for slot, limits in plan.changes.limits])
            self.ops.place_limits(len(plan.changes.limits), step)

    def decode(self, rows: int) -> None:
        """Run a decode step of `rows` rows through the operations, as eager and capture do."""
        b = self.buffers
        decode_step(self.ops, self.model, b.acts, b.workspace, b.slab, rows)

    def attend(self, rows: int) -> None:
        """Run a step of `rows` rows of attention that clients have sent, likewise."""
        self._attend.run(rows)

    def prompt(self, plan: StepPlan, step: int) -> None:
        """Run a prompt chunk through the operations, as step number `step`."""
        b = self.buffers
        top = None if plan.prompt_scores is None else plan.prompt_scores.top
        prompt_chunk(
            self.ops, self.model, b.acts, b.workspace, b.slab, plan.rows, plan.is_last, top,
            step,
        )  # fmt: skip

    def score(self, plan: StepPlan, step: int) -> None:
        """Behind step number `step`: score the rows that it sampled from, if its plan asks."""
        asked = plan.scores
        if asked is not None:
            first = 0 if plan.is_chunk else asked.first
            logits = self.buffers.acts.logits
            self.ops.score(logits, first, asked.rows, asked.first, asked.top, step)

    def score_numbers(self, plan: StepPlan) -> Iterator[memoryview]:
        """What becomes the oldest step's number when its scores are there."""
        for asked in (plan.scores, plan.prompt_scores):
            if asked is not None:
                yield from self._scores.numbers(asked, self.completed)

    @property
    def oldest(self) -> Stager:
        """The entry of the oldest step that is not read back."""
        return self._stagers[self.completed % len(self._stagers)]

    def outputs(self, plan: StepPlan, logits: dict[int, NDArray[np.float32]]) -> StepOutputs:
        """Read the oldest entry's outputs, which must be complete, and let it go."""
        outputs = self.oldest.outputs(plan, logits)
        if plan.scores is not None:
            outputs.scores = self._scores.read(plan.scores, self.completed)
        if plan.prompt_scores is not None:
            outputs.prompt_scores = self._scores.read(plan.prompt_scores, self.completed)
        if plan.attends:
            outputs.attended = self._attend_desk.read(plan.rows, self.completed)
        self.completed += 1
        return outputs


def seat_limits(limits: Limits | None) -> SeatLimits:
    """A request's limits as the kernels want them."""
    if limits is None:
        return NO_LIMITS
    return SeatLimits(limits.bias_ids, limits.bias_values, limits.mask)


class _Pending(NamedTuple):
    """A staged plan, and the pages to be filled behind it."""

    plan: StepPlan
    bucket: int
    writes: list[tuple[Sequence[int], NDArray[np.uint8]]]


class CpuBackend:
    """`Backend` over the torch reference. wait() computes, so that a launch behind another one
    does not delay the events of the first."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.eager = True  # there are no graphs
        self.graph_replays = self.graph_fallbacks = 0
        self.on_long_wait: Callable[[], None] = lambda: None  # it computes in its waits
        self._pending: deque[_Pending] = deque()

    def launch(self, plan: StepPlan, bucket: int) -> None:
        """Stage the plan."""
        self.runner.stage(plan, bucket)
        self._pending.append(_Pending(plan, bucket, []))

    def is_done(self) -> bool:
        """Never: wait() computes."""
        return False

    def wait(self) -> StepOutputs:
        """Compute the oldest staged plan."""
        plan, bucket, writes = self._pending.popleft()
        runner = self.runner
        if plan.changes.moves is not None:
            self.move(plan.changes.moves)
        runner.place_limits(plan, runner.completed)
        if plan.attends:
            runner.attend(bucket)
        elif plan.is_chunk:
            runner.prompt(plan, runner.completed)
        else:
            runner.decode(bucket)
        runner.score(plan, runner.completed)
        step = runner.completed + 1
        assert runner.oldest.step[0] == step, "the step was not published"
        for pages, data in writes:
            self._page_bytes()[list(pages)] = data
        rows = runner.buffers.acts.logits
        return runner.outputs(plan, {row: rows[row].numpy().copy() for row in plan.logit_rows})

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """See Backend."""
        return self._page_bytes()[list(pages)]

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """See Backend. It waits its turn behind the plans that are not computed yet."""
        if self._pending:
            self._pending[-1].writes.append((pages, data.copy()))
        else:
            self._page_bytes()[list(pages)] = data

    def _page_bytes(self) -> NDArray[np.uint8]:
        slab = self.runner.buffers.slab
        return slab.view(torch.uint8).numpy().reshape(len(slab), -1)

    def move(self, moves: Moves) -> None:
        """Make the moves of a plan."""
        slab, table = self.runner.buffers.slab, self.runner.buffers.inputs.block_table
        for source, target in moves.copies:
            slab[target] = slab[source]
        for slot_id, first, pages in moves.rows:
            table[slot_id, first : first + len(pages)] = torch.from_numpy(pages)
