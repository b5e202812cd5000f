"""Counts of times by fixed buckets: cheap enough for every step, exact however they are added."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (
    50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3,
    7.5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of the buckets; one more bucket has all that is longer."""


class Histogram:
    """Times that were counted, by bucket, and their sum; in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, time_s: float, times: int = 1) -> None:
        """Count a time, or one that as many have had."""
        self.counts[bisect_left(BOUNDS_S, time_s)] += times
        self.sum_s += time_s * times

    def figures(self) -> dict[str, object]:
        """As stats tell it: `counts` by bucket (not added up), `sum_s`."""
        return {"counts": list(self.counts), "sum_s": round(self.sum_s, 9)}
