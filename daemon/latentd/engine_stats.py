"""Counters and step times of the engine, cheap enough to keep for every step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd.histogram import BOUNDS_S, Histogram
from latentd_client.fields import MAX_TRACED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from latentd.plans import StepPlan

    Timed: TypeAlias = tuple[str, int, int, bool, float, float, float, float, int, int]
    """A launch: its kind ("step", "chunk" or "attend"), its bucket (a chunk's rows), its rows,
    whether it was queued behind another one; in seconds of one clock since when its first row was
    queued (0: unknown), when staging began, when it was launched, when its end was seen; start and
    end in ns by the device's clock."""

RING_STEPS = 1024
"""Steps a bucket's percentiles look back on."""
FED: Final = -1
"""The token of a row that goes on with what the launch before it samples (see StepPlan): the same
stream had a token in that one."""


@dataclass(slots=True)
class Launch:
    """A plan in flight. `start_s`: when its staging began, `launched_s`: when it was on its way to
    the device; `is_behind`: it was queued behind another one."""

    plan: StepPlan
    bucket: int
    start_s: float
    launched_s: float
    is_behind: bool


class StepTimes(Histogram):
    """Times of one bucket's steps: those of the last RING_STEPS, and a histogram of all of them,
    from staging to commit."""

    __slots__ = ("count", "timed")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.timed: deque[Timed] = deque(maxlen=RING_STEPS)

    def note(self, timed: Timed) -> None:
        """Note one step."""
        self.timed.append(timed)
        self.count += 1
        step_s = timed[7] - timed[5]
        self.counts[bisect_left(BOUNDS_S, step_s)] += 1  # as `add`, which costs a call more
        self.sum_s += step_s

    def device_us(self) -> dict[str, float]:
        """p50 and p99 of the device time, in microseconds."""
        return _percentiles([timed[9] - timed[8] for timed in self.timed], 1e-3)

    def step_us(self) -> dict[str, float]:
        """p50 and p99 of the step time, in microseconds."""
        return _percentiles([timed[7] - timed[5] for timed in self.timed], 1e6)


class EngineStats:
    """What the engine counts. `chunks` are prompt chunks; `steps` are decode launches."""

    def __init__(self, buckets: Iterable[int]) -> None:
        self._buckets = tuple(buckets)
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.times = {bucket: StepTimes() for bucket in self._buckets}
        self.chunk_times = StepTimes()
        self.attend_times = StepTimes()
        self.attend_rows = 0
        self.done: list[tuple[Launch, int, int, float]] = []
        """Launches that `fold` has not counted: start and end in ns by the device's clock, and when
        the host saw the end."""
        self.trace: deque[Timed] = deque(maxlen=MAX_TRACED)
        """The last launches that were counted, in the order of their end."""
        self.step_queue, self.open_queue = Histogram(), Histogram()
        self.inter_token = Histogram()
        self._last_token_s = 0.0
        self.rows = 0
        self.first_tokens = 0
        self.prompt_tokens = 0
        self.opens = 0
        self.forks = 0
        self.prefix_queries = self.prefix_hits = self.prefix_hit_tokens = 0
        self.drafted = self.accepted = 0  # tokens of drafts
        self.failed: Counter[str] = Counter()

    @property
    def tokens(self) -> int:
        """Tokens sampled: one a row of a step and one a prompt."""
        return self.rows + self.first_tokens

    def note_prompt(self, cached_tokens: int) -> None:
        """Count a prompt whose beginning was looked for in the prefix cache."""
        self.prefix_queries += 1
        self.prefix_hits += cached_tokens > 0
        self.prefix_hit_tokens += cached_tokens

    def fold(self) -> None:
        """Count the launches in `done`; called when there is time, not when one ends."""
        for launch, start_ns, end_ns, end_s in self.done:
            plan, start_s, is_behind = launch.plan, launch.start_s, launch.is_behind
            queued_s, rows = plan.queued_s, plan.rows
            kind = "attend" if plan.attends else "chunk" if plan.is_chunk else "step"
            timed = (
                kind, launch.bucket, rows, is_behind, queued_s, start_s, launch.launched_s, end_s,
                start_ns, end_ns,
            )  # fmt: skip
            self.trace.append(timed)
            if plan.attends:
                self.attend_times.note(timed)
                self.attend_rows += rows
            elif plan.is_chunk:
                self.chunk_times.note(timed)
                self.prompt_tokens += rows
                if queued_s:
                    self.open_queue.add(start_s - queued_s)
            else:
                self.times[launch.bucket].note(timed)
                self.rows += rows
                if queued_s:
                    queue, wait_s = self.step_queue, start_s - queued_s
                    queue.counts[bisect_left(BOUNDS_S, wait_s)] += 1
                    queue.sum_s += wait_s
                if is_behind and (fed := plan.token_ids.count(FED)):  # type: ignore[union-attr]
                    self.inter_token.add(end_s - self._last_token_s, fed)
                self._last_token_s = end_s
        self.done.clear()

    def _idle_ns(self) -> list[int]:
        """What the device did nothing in front of launches that were queued behind another, among
        those of the trace."""
        pairs = pairwise(self.trace)
        return [step[8] - before[9] for before, step in pairs if step[3]]

    def histograms(self) -> dict[str, object]:
        """Figures of all histograms, by what they time; `step` by bucket, of those that ran."""
        ran = {str(bucket): times for bucket, times in self.times.items() if times.count}
        return {
            "bounds_s": list(BOUNDS_S),
            "step": {bucket: times.figures() for bucket, times in ran.items()},
            "chunk": self.chunk_times.figures(),
            "attend": self.attend_times.figures(),
            "step_queue": self.step_queue.figures(),
            "open_queue": self.open_queue.figures(),
            "inter_token": self.inter_token.figures(),
        }

    def snapshot(self) -> dict[str, object]:
        """Plain numbers and dicts; times only of buckets that ran."""
        self.fold()
        ran = {bucket: times for bucket, times in self.times.items() if times.count}
        return {
            "steps": sum(times.count for times in ran.values()),
            "steps_by_bucket": {str(bucket): times.count for bucket, times in ran.items()},
            "chunks": self.chunk_times.count,
            "attends": self.attend_times.count,
            "attend_rows": self.attend_rows,
            "rows": self.rows,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "opens": self.opens,
            "forks": self.forks,
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "failed": dict(self.failed),
            "device_us": {str(bucket): times.device_us() for bucket, times in ran.items()},
            "step_us": {str(bucket): times.step_us() for bucket, times in ran.items()},
            "chunk_us": self.chunk_times.step_us(),
            "attend_us": self.attend_times.step_us(),
            "attend_device_us": self.attend_times.device_us(),
            "idle_us": _percentiles(self._idle_ns(), 1e-3),
            "histograms": self.histograms(),
        }


def _percentiles(values: Sequence[float], scale: float) -> dict[str, float]:
    """p50 and p99, in another unit."""
    if not values:
        return {}
    ranked = np.sort(np.array(values, np.float32))  # a tenth of the time of np.percentile
    p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
    return {"p50": round(float(p50) * scale, 1), "p99": round(float(p99) * scale, 1)}
