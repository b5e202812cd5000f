"""The self-test: on this device and checkpoint, results that must be the same bits are compared.

It drives an idle engine through its own queues on scratch slots, which it closes again, and zeroes
every page it used. Real rows with ragged lengths stand in every bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd.options import SelftestFailed, StartError
from latentd.selftest_attend import check_attends
from latentd.selftest_probe import Probe, slab_of
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine

ALONE_ROWS = 16
"""Rows that are also run alone."""
STREAM_STEPS = 8
"""Tokens that are decoded as a stream and one by one."""


@dataclass
class SelftestReport:
    """One line a check; `failures` holds those that found a difference."""

    lines: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def note(self, check: str, failed: Sequence[str], passed: str) -> None:
        """Add the outcome of a check."""
        line = f"{check}: " + (f"FAILED ({'; '.join(failed)})" if failed else passed)
        self.lines += (line,)
        if failed:
            self.failures += (line,)

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if self.failures:
            return f"FAILED: {len(self.failures)} of {len(self.lines)} checks found a difference"
        return f"passed: all {len(self.lines)} checks"

    def require(self) -> SelftestReport:
        """Raise SelftestFailed unless everything was the same."""
        if self.failures:
            raise SelftestFailed("the self-test failed: " + " | ".join(self.failures))
        return self


def run_selftest(engine: Engine) -> SelftestReport:
    """Compare replay with eager, rows alone with rows in a batch, streams with steps, and page
    orders with each other.

    Raises StartError when the engine has slots in use; counters are reset afterwards.
    """
    if engine.slots.num_used or engine.has_work:
        raise StartError("the self-test needs an engine without slots in use")
    report = SelftestReport()
    _check_slab(engine, report)
    if engine.info.attend_only:
        check_attends(engine, report)
    else:
        _check_all(engine, report)
    return report


def _check_all(engine: Engine, report: SelftestReport) -> None:
    probe = Probe(engine)
    try:
        check_attends(engine, report)
        probe.open_all()
        _check_buckets(probe, report)
        _check_stream(probe, report)
        probe.close_all()
        _check_page_order(probe, report)
    finally:
        probe.clean_up()


def _check_slab(engine: Engine, report: SelftestReport) -> None:
    """Warm-up and capture ran padding rows only; the pool must still be zero (cuda)."""
    slab = slab_of(engine)
    if not slab.is_cuda:
        return
    torch.cuda.synchronize()
    dirty = [
        f"pages {first} to {first + 63}"
        for first in range(0, len(slab), 64)
        if bool(slab[first : first + 64].view(torch.int16).any())
    ]
    passed = f"all {len(slab)} pages are zero"
    report.note("warm-up and capture write no page", dirty[:3], passed)


def _check_buckets(probe: Probe, report: SelftestReport) -> None:
    smallest = probe.buckets[0]
    alone = [probe.step([slot], 0, smallest, False)[0] for slot in probe.slots[:ALONE_ROWS]]
    unlike_eager, unlike_alone, not_finite = [], [], 0
    for bucket in probe.buckets:
        rows = probe.slots[:bucket]
        for seed in (0, 1):
            found = probe.step(rows, seed, bucket, False)
            not_finite += sum(
                not np.isfinite(np.frombuffer(logits, np.float32)).all() for _, logits in found
            )
            if probe.has_graphs and found != probe.step(rows, seed, bucket, True):
                unlike_eager.append(f"bucket {bucket}, inputs {seed}")
            if seed == 0:
                unlike_alone += [
                    f"row {row} of bucket {bucket}"
                    for row, pair in enumerate(zip(alone, found, strict=False))
                    if pair[0] != pair[1]
                ]
    sizes = ", ".join(map(str, probe.buckets))
    lengths = [slot.prompt_len + 1 for slot in probe.slots]
    if probe.has_graphs:
        passed = (
            f"buckets {sizes} give the same bits; "
            f"contexts of {min(lengths)} to {max(lengths)} tokens"
        )
        report.note("graph = eager", unlike_eager[:5], passed)
    passed = f"{len(alone)} rows have the same bits alone and in batches of {sizes}"
    report.note("row alone = row in a batch", unlike_alone[:5], passed)
    failed = [f"not in {not_finite} rows"] * bool(not_finite)
    report.note("logits are finite", failed, "in all rows")


def _check_stream(probe: Probe, report: SelftestReport) -> None:
    """Of one slot, the longest of the first few; nothing where there is no room for two steps."""
    slot = max(probe.slots[:ALONE_ROWS], key=lambda slot: slot.prompt_len)
    steps = min(STREAM_STEPS, probe.room(slot))
    if steps < 2:
        return
    stepped = probe.follow(slot, steps, False)
    differ = ["tokens or log-probabilities"] * (probe.follow(slot, steps, True) != stepped)
    passed = f"{steps} tokens are the same, launched ahead and one by one"
    report.note("stream = steps", differ, passed)


def _check_page_order(probe: Probe, report: SelftestReport) -> None:
    engine = probe.engine
    pool = engine.slots.pool
    length = min(66 if probe.on_cpu else 200, engine.info.max_ctx - 1)
    order = pool.free_pages()
    outcomes = []
    for pages in (order, order[::-1]):
        pool.reorder(pages)
        probe.slots = [probe.open(length, 77)]
        outcomes.append(probe.step(probe.slots, 2, engine.info.buckets[0], False))
        probe.close_all()
    pool.reorder(order)
    differ = ["reversed free list"] * (outcomes[0] != outcomes[1])
    passed = f"the same bits on {num_pages(length + 1)} pages in order and on others in reverse"
    report.note("page order", differ, passed)
