"""Figures of the engine as they were at a moment: told on whatever thread has the time."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from latentd.histogram import BOUNDS_S, Histogram

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

KIND, ROWS, FED, QUEUED, STAGED, LAUNCHED, SEEN, START, END = range(9)
"""Columns of a launch: its kind, its rows, how many of those go on with what the launch before it
samples (-1: it was not queued behind another one); in ns of the host's clock since when its first
row was queued (0: not known), when its staging began, when it was on its way to the device, when
its end was seen; its start and end in ns by the device's clock."""
NUM_BEGUN: Final = SEEN
"""Columns that are known when it begins, the first ones; the others when it has ended."""
NUM_COLUMNS: Final = END + 1
KINDS: Final = ("step", "chunk", "attend")
STEP, CHUNK, ATTEND = range(3)
RING_STEPS: Final = 1024
"""Steps a bucket's percentiles look back on."""


class Times(Histogram):
    """Times of launches of one shape: a histogram of all, from staging to commit, and `recent`, the
    last RING_STEPS of them: [2, launches] in ns, on the device and from staging to commit."""

    __slots__ = ("recent",)

    def __init__(self) -> None:
        super().__init__()
        self.recent = np.zeros((2, 0), np.int64)

    def note(self, found: NDArray[np.int64]) -> None:
        """Count launches, [NUM_COLUMNS, launches]."""
        took_ns = found[SEEN] - found[STAGED]
        self.add_all(took_ns)
        both = found[END] - found[START], took_ns
        self.recent = np.concatenate((self.recent, both), axis=1)[:, -RING_STEPS:]

    def copy(self) -> Self:
        """See Histogram."""
        other = super().copy()
        other.recent = self.recent  # never written, only replaced
        return other

    @property
    def count(self) -> int:
        """How many there were."""
        return int(self.counts.sum())

    def device_us(self) -> dict[str, float]:
        """p50 and p99 of the device time."""
        return _percentiles(self.recent[0])

    def step_us(self) -> dict[str, float]:
        """p50 and p99 of the time from staging to commit."""
        return _percentiles(self.recent[1])


class EngineFigures(NamedTuple):
    """What the engine had counted. `step_times` are by bucket; `launches` the last ones that have
    ended, the oldest first, [NUM_COLUMNS, launches]."""

    plain: dict[str, object]
    buckets: list[int]
    step_times: list[Times]
    chunk_times: Times
    attend_times: Times
    queues: dict[str, Histogram]
    launches: NDArray[np.int64]

    def stats(self) -> dict[str, Any]:
        """Plain numbers and dicts; times only of buckets that ran."""
        by_bucket = zip(map(str, self.buckets), self.step_times, strict=True)
        ran = {bucket: times for bucket, times in by_bucket if times.count}
        steps_by_bucket = {bucket: times.count for bucket, times in ran.items()}
        return {
            **self.plain,
            "steps": sum(steps_by_bucket.values()),
            "steps_by_bucket": steps_by_bucket,
            "chunks": self.chunk_times.count,
            "attends": self.attend_times.count,
            "device_us": {bucket: times.device_us() for bucket, times in ran.items()},
            "step_us": {bucket: times.step_us() for bucket, times in ran.items()},
            "chunk_us": self.chunk_times.step_us(),
            "attend_us": self.attend_times.step_us(),
            "attend_device_us": self.attend_times.device_us(),
            "idle_us": _percentiles(self._idle_ns()),
            "histograms": {
                "bounds_s": list(BOUNDS_S),
                "step": {bucket: times.figures() for bucket, times in ran.items()},
                "chunk": self.chunk_times.figures(),
                "attend": self.attend_times.figures(),
                **{name: queue.figures() for name, queue in self.queues.items()},
            },
        }

    def _idle_ns(self) -> NDArray[np.int64]:
        """What the device did nothing in front of launches that were queued behind another."""
        idle_ns = self.launches[START, 1:] - self.launches[END, :-1]
        return idle_ns[self.launches[FED, 1:] >= 0]

    def trace(self, last: int) -> list[list[Any]]:
        """The last launches as `Control.trace` describes them."""
        steps = []
        for kind, rows, fed, *times_ns in self.launches[:, -last:].T.tolist():
            bucket = rows if kind == CHUNK else self.buckets[bisect_left(self.buckets, rows)]
            seconds = [time_ns / 1e9 for time_ns in times_ns[: START - QUEUED]]
            device_ns = times_ns[START - QUEUED :]
            steps.append([KINDS[kind], bucket, rows, fed >= 0, *seconds, *device_ns])
        return steps


def _percentiles(times_ns: NDArray[np.int64]) -> dict[str, float]:
    """p50 and p99, in microseconds."""
    if not times_ns.size:
        return {}
    ranked = np.sort(times_ns)  # a tenth of the time of np.percentile
    p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
    return {"p50": round(float(p50) / 1e3, 1), "p99": round(float(p99) / 1e3, 1)}
