"""Quantiles of times that were counted by bucket, between two looks at a histogram."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple


class Quantiles(NamedTuple):
    """How many times were counted, and two of their quantiles in seconds."""

    total: int
    p50_s: float
    p99_s: float


def quantiles(
    bounds_s: list[float], after: dict[str, Any], before: dict[str, Any] | None
) -> Quantiles:
    """Of what a histogram has counted between two looks. Within a bucket times are taken to be
    spread evenly; those beyond the last bound to be that bound."""
    counts = list(after["counts"])
    if before is not None:
        counts = [new - old for new, old in zip(counts, before["counts"], strict=True)]
    total = sum(counts)
    return Quantiles(total, *(_quantile(bounds_s, counts, total * part) for part in (0.5, 0.99)))


def _quantile(bounds_s: list[float], counts: list[int], rank: float) -> float:
    """The time that `rank` of those counted do not exceed; not a number where none are."""
    if not rank:
        return math.nan
    idx, below = next((i, n) for i, n in enumerate(accumulate(counts)) if n >= rank)
    if idx == len(bounds_s):
        return bounds_s[-1]
    low = bounds_s[idx - 1] if idx else 0.0
    return low + (bounds_s[idx] - low) * (1 - (below - rank) / counts[idx])
