"""Counters and times of the engine, cheap enough to keep for every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd.engine_figures import (
    ATTEND,
    CHUNK,
    FED,
    KIND,
    NUM_BEGUN,
    NUM_COLUMNS,
    QUEUED,
    ROWS,
    SEEN,
    STAGED,
    STEP,
    EngineFigures,
    Times,
)
from latentd.histogram import Histogram
from latentd_client.fields import MAX_TRACED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FOLD_AT: Final = 128
"""Launches that are counted together. Measured between steps: 64 of them take 59 us, 0.9 a launch,
128 take 79, 0.6 a launch, and 256 take 173, 0.7 a launch, which a short step would notice."""
NUM_ENDED: Final = NUM_COLUMNS - NUM_BEGUN
LONG: Final = FOLD_AT * NUM_ENDED
"""Length of `ended` from which on to call `fold`."""


class EngineStats:
    """What the engine counts. A launch leaves its numbers in `launched` when it begins and in
    `ended`, in the same order, when its end is seen: the columns of `engine_figures` one after the
    other, and no object. `fold` counts them when there is time."""

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = np.array(buckets, np.int64)
        self.launched: list[int] = []
        self.ended: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.fold()
        self.step_times = [Times() for _ in self._buckets]
        self.chunk_times, self.attend_times = Times(), Times()
        self.launches = np.zeros((NUM_COLUMNS, 0), np.int64)
        self.queues = {name: Histogram() for name in ("step_queue", "open_queue", "inter_token")}
        self._last_token_ns = 0
        self.rows = self.attend_rows = 0
        self.first_tokens = self.prompt_tokens = 0
        self.opens = self.forks = 0
        self.prefix_queries = self.prefix_hits = self.prefix_hit_tokens = 0
        self.drafted = self.accepted = 0  # tokens of drafts
        self.failed: Counter[str] = Counter()

    def note_prompt(self, cached_tokens: int) -> None:
        """Count a prompt whose beginning was looked for in the prefix cache."""
        self.prefix_queries += 1
        self.prefix_hits += cached_tokens > 0
        self.prefix_hit_tokens += cached_tokens

    def fold(self) -> None:
        """Count the launches that have ended."""
        count = len(self.ended) // NUM_ENDED
        if not count:
            return
        found = np.empty((NUM_COLUMNS, count), np.int64)
        _take(self.launched, found[:NUM_BEGUN])
        _take(self.ended, found[NUM_BEGUN:])
        self.launches = np.concatenate((self.launches, found), axis=1)[:, -MAX_TRACED:]
        kinds = found[KIND]
        is_mixed = kinds.any()
        steps = found[:, kinds == STEP] if is_mixed else found
        if steps.size:
            self._count_steps(steps)
        if is_mixed:
            self._count_others(found[:, kinds == CHUNK], found[:, kinds == ATTEND])

    def _count_steps(self, steps: NDArray[np.int64]) -> None:
        """Rows, times, waits in front of them, and how long their streams' tokens came apart."""
        rows, fed, seen = steps[ROWS], steps[FED], steps[SEEN]
        self.rows += int(rows.sum())
        shapes = np.searchsorted(self._buckets, rows)
        for shape in np.flatnonzero(np.bincount(shapes)):
            self.step_times[shape].note(steps[:, shapes == shape])
        _add_waits(self.queues["step_queue"], steps)
        is_fed = fed > 0
        if is_fed.any():
            gaps_ns = seen.copy()
            gaps_ns[1:] -= seen[:-1]
            gaps_ns[0] -= self._last_token_ns
            self.queues["inter_token"].add_all(gaps_ns[is_fed], fed[is_fed])
        self._last_token_ns = int(seen[-1])

    def _count_others(self, chunks: NDArray[np.int64], attends: NDArray[np.int64]) -> None:
        self.chunk_times.note(chunks)
        self.prompt_tokens += int(chunks[ROWS].sum())
        _add_waits(self.queues["open_queue"], chunks)
        self.attend_times.note(attends)
        self.attend_rows += int(attends[ROWS].sum())

    def snapshot(self, gauges: dict[str, object]) -> EngineFigures:
        """What was counted so far beside other figures, for any thread to tell."""
        self.fold()
        names = (
            "rows", "attend_rows", "prompt_tokens", "opens", "forks", "prefix_queries",
            "prefix_hits", "prefix_hit_tokens", "drafted", "accepted",
        )  # fmt: skip
        plain = {name: getattr(self, name) for name in names}
        plain["tokens"] = self.rows + self.first_tokens
        plain["failed"] = dict(self.failed)
        return EngineFigures(
            {**gauges, **plain},
            self._buckets.tolist(),
            [times.copy() for times in self.step_times],
            self.chunk_times.copy(),
            self.attend_times.copy(),
            {name: queue.copy() for name, queue in self.queues.items()},
            self.launches,
        )


def _take(numbers: list[int], columns: NDArray[np.int64]) -> None:
    """Take the oldest launches out of a list, into columns."""
    taken = np.fromiter(numbers, np.int64, columns.size)
    columns[:] = taken.reshape(columns.shape[::-1]).T
    del numbers[: columns.size]


def _add_waits(queue: Histogram, found: NDArray[np.int64]) -> None:
    """Count how long what has waited did."""
    queued_ns = found[QUEUED]
    has_waited = queued_ns > 0
    if has_waited.any():
        queue.add_all((found[STAGED] - queued_ns)[has_waited])
