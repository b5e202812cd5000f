"""Counters and step times of the engine, cheap enough to keep for every step."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from latentd.plans import StepPlan

RING_STEPS = 1024
"""Steps a bucket's percentiles look back on."""


@dataclass(slots=True)
class Launch:
    """A plan in flight. `start_s`: when it was staged; `is_behind`: it was queued behind another
    one."""

    plan: StepPlan
    bucket: int
    start_s: float
    is_behind: bool


class StepTimes:
    """Times of the last RING_STEPS steps of one bucket, in microseconds."""

    def __init__(self) -> None:
        self.count = 0
        self._times: deque[tuple[float, float]] = deque(maxlen=RING_STEPS)

    def add(self, device_us: float, step_us: float) -> None:
        """Note one step: time on the device, and from the start of staging to the commit."""
        self._times.append((device_us, step_us))
        self.count += 1

    def device_us(self) -> dict[str, float]:
        """p50 and p99 of the device time."""
        return _percentiles([device_us for device_us, _ in self._times])

    def step_us(self) -> dict[str, float]:
        """p50 and p99 of the step time."""
        return _percentiles([step_us for _, step_us in self._times])


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
        """Launches that `fold` has not counted: start and end in ns by the device's clock, and the
        seconds from staging to the commit."""
        self._last_end_ns = 0
        self.idle_ns: deque[int] = deque(maxlen=RING_STEPS)
        """What the device did nothing in front of launches that were queued behind another."""
        self.rows = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.opens = 0
        self.forks = 0
        self.prefix_queries = self.prefix_hits = self.prefix_hit_tokens = 0
        self.drafted = self.accepted = 0  # tokens of drafts
        self.failed: Counter[str] = Counter()

    def note_prompt(self, cached_tokens: int) -> None:
        """Count a prompt whose beginning was looked for in the prefix cache."""
        self.prefix_queries += 1
        self.prefix_hits += cached_tokens > 0
        self.prefix_hit_tokens += cached_tokens

    def fold(self) -> None:
        """Count the launches in `done`; called when there is time, not when one ends."""
        for launch, start_ns, end_ns, took_s in self.done:
            plan, device_us, step_us = launch.plan, (end_ns - start_ns) / 1e3, took_s * 1e6
            if launch.is_behind:
                self.idle_ns.append(start_ns - self._last_end_ns)
            self._last_end_ns = end_ns
            if plan.attends:
                self.attend_times.add(device_us, step_us)
                self.attend_rows += plan.rows
            elif plan.is_chunk:
                self.chunk_times.add(device_us, step_us)
                self.prompt_tokens += plan.rows
            else:
                self.times[launch.bucket].add(device_us, step_us)
                self.rows += plan.rows
                self.tokens += plan.rows
        self.done.clear()

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
            "idle_us": _percentiles([idle_ns / 1e3 for idle_ns in self.idle_ns]),
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ranked = np.sort(np.array(values, np.float32))  # a tenth of the time of np.percentile
    p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}
