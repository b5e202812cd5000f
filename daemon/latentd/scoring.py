"""Scores of a step between engine and device: what is asked for, and what has come of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from latentd.extras import Scores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd.plans import OpenTask
    from latentd_kernels.scores import ScoreRing


class ScorePlan(NamedTuple):
    """Rows first .. first + rows of a step: `top` likeliest ids of each, and the log-probabilities
    of `targets`, if there are any."""

    first: int
    rows: int
    top: int
    targets: NDArray[np.int32] | None = None


def scores_of_rows(tops: Sequence[int]) -> ScorePlan:
    """What the rows of a decode step ask for, each for so many likeliest ids and one at least for
    any: all rows from the first to the last that does."""
    asking = [row for row, top in enumerate(tops) if top]
    return ScorePlan(asking[0], asking[-1] + 1 - asking[0], max(tops))


def scores_of_last(task: OpenTask, rows: int) -> ScorePlan | None:
    """What the last row of a prompt asks for, whose chunk has `rows` rows."""
    top = task.request.extras.top
    return ScorePlan(rows - 1, 1, top) if top else None


def scores_of_prompt(task: OpenTask, first: int, end: int) -> ScorePlan | None:
    """What a chunk of the tokens first .. end of a prompt tells of those that follow each."""
    top = task.request.extras.prompt_top
    targets = task.prompt[first + 1 : end + 1]
    return ScorePlan(0, len(targets), top, targets) if top is not None and len(targets) else None


class ScoreDesk:
    """Writes and reads entries of the score ring."""

    def __init__(self, ring: ScoreRing) -> None:
        self._entries = [ring.entry(step) for step in range(ring.entries)]

    def stage(self, plan: ScorePlan, step: int) -> None:
        """Name the targets of a plan in the entry of step number `step`."""
        entry = self._entries[step % len(self._entries)]
        targets = -1 if plan.targets is None else plan.targets
        entry.targets[plan.first : plan.first + plan.rows] = targets

    def numbers(self, plan: ScorePlan, step: int) -> Iterator[memoryview]:
        """What becomes `step` + 1 when a plan's scores are there."""
        done = memoryview(self._entries[step % len(self._entries)].done.data)
        for row in range(plan.first, plan.first + plan.rows):
            yield done[row : row + 1]

    def read(self, plan: ScorePlan, step: int) -> Scores:
        """A plan's scores, which must be there."""
        entry = self._entries[step % len(self._entries)]
        rows = slice(plan.first, plan.first + plan.rows)
        return Scores(
            entry.ids[rows, : plan.top].copy(),
            entry.logprobs[rows, : plan.top].copy(),
            entry.target_logprobs[rows].copy(),
        )
