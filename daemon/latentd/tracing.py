"""The launches that a daemon remembers: as stages of time, and for Chrome and Perfetto."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STAGES: Final = ("queue", "stage", "start", "device", "notice")
"""What follows what in a launch: its first row waits; the host stages it; it waits for the device,
perhaps behind another one; it runs; the host sees its end and commits."""
HOST, DEVICE = 1, 2
"""Tracks of the engine thread and the device."""


class Traced(NamedTuple):
    """A launch. `times_us`: the begin of each of STAGES and the end of the last one, in the
    daemon's clock; they never fall."""

    kind: str
    bucket: int
    rows: int
    is_behind: bool
    times_us: tuple[float, ...]

    @property
    def name(self) -> str:
        """What launches of the same shape share."""
        return self.kind if self.kind == "chunk" else f"{self.kind} {self.bucket}"


def read(steps: Sequence[Sequence[Any]]) -> list[Traced]:
    """What `Control.trace` gives. The device's clock has a zero of its own: it is laid so that the
    end which was noticed soonest was noticed at once."""
    shift_us = min((step[7] * 1e6 - step[9] / 1e3 for step in steps), default=0.0)
    traced = []
    for kind, bucket, rows, is_behind, queued_s, *seconds, start_ns, end_ns in steps:
        staged, launched, seen = (time_s * 1e6 for time_s in seconds)
        device = (time_ns / 1e3 + shift_us for time_ns in (start_ns, end_ns))
        times = (queued_s * 1e6 or staged, staged, launched, *device, seen)
        traced.append(Traced(kind, bucket, rows, is_behind, tuple(accumulate(times, max))))
    return traced


def summary(traced: Sequence[Traced]) -> Iterator[str]:
    """A line for each shape of launches: medians of its stages, in microseconds."""
    yield f"{'launches of':<14}{'':>8}" + "".join(f"{stage:>10}" for stage in STAGES) + "  us, p50"
    shapes = {step.name: (step.kind, step.bucket) for step in traced}
    for name in sorted(shapes, key=shapes.__getitem__):
        times = np.array([step.times_us for step in traced if step.name == name])
        medians = np.median(np.diff(times, axis=1), axis=0)
        yield f"{name:<14}{len(times):>8}" + "".join(f"{median:>10.1f}" for median in medians)


def chrome(traced: Sequence[Traced]) -> dict[str, Any]:
    """A trace for ui.perfetto.dev or chrome://tracing. Launches overlap, so each is an
    asynchronous event among those of its shape; what the engine thread and the device do is on a
    track each besides."""
    events = [_named(HOST, "engine thread: staging"), _named(DEVICE, "device")]
    zero_us = min((step.times_us[0] for step in traced), default=0.0)
    for number, step in enumerate(traced):
        times = [round(time_us - zero_us, 3) for time_us in step.times_us]
        about = {"rows": step.rows, "bucket": step.bucket, "behind another": step.is_behind}
        events += _async(number, step.name, step.name, times[0], times[-1], about)
        for stage, (begin, end) in zip(STAGES, pairwise(times), strict=True):
            events += _async(number, step.name, stage, begin, end, {})
        for track, first in ((HOST, 1), (DEVICE, 3)):
            begin, end = times[first : first + 2]
            events.append(
                {"ph": "X", "pid": 1, "tid": track, "name": step.name, "ts": begin,
                 "dur": round(end - begin, 3), "args": about}
            )  # fmt: skip
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _named(track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}


def _async(
    number: int, shape: str, name: str, begin: float, end: float, about: dict[str, Any]
) -> list[dict[str, Any]]:
    common = {"pid": 1, "tid": HOST, "cat": shape, "id": number, "name": name}
    return [{**common, "ph": "b", "ts": begin, "args": about}, {**common, "ph": "e", "ts": end}]
