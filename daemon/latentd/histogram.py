"""Counts of times by fixed buckets: exact however they are added, and cheap for many at once."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

BOUNDS_S: Final = (
    50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3,
    7.5e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of the buckets; one more bucket has all that is longer."""
BOUNDS_NS: Final = tuple(round(bound_s * 1e9) for bound_s in BOUNDS_S)
_BOUNDS: Final = np.array(BOUNDS_NS, np.int64)


class Histogram:
    """Times that were counted, by bucket, and their sum; in nanoseconds."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self.sum_ns = 0

    def add(self, time_ns: int) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS_NS, time_ns)] += 1
        self.sum_ns += time_ns

    def add_all(
        self, times_ns: NDArray[np.int64], weights: NDArray[np.int64] | None = None
    ) -> None:
        """Count times, each once or as often as its weight says."""
        buckets = np.searchsorted(_BOUNDS, times_ns)
        self.counts += np.bincount(buckets, weights, len(self.counts)).astype(np.int64)
        self.sum_ns += int(times_ns.sum() if weights is None else times_ns @ weights)

    def copy(self) -> Self:
        """One that stays as it is, for another thread."""
        other = type(self)()
        other.counts, other.sum_ns = self.counts.copy(), self.sum_ns
        return other

    def figures(self) -> dict[str, object]:
        """As stats tell it: `counts` by bucket (not added up), `sum_s`."""
        return {"counts": self.counts.tolist(), "sum_s": self.sum_ns / 1e9}
