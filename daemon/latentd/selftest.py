"""The self-test: on this device and checkpoint, results that must be the same bits are compared.

It drives an idle engine through its own queues on scratch slots, which it closes again, and zeroes
every page it used. Real rows with ragged lengths stand in every bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd.backend_cuda import CudaBackend
from latentd.backend_steps import CpuBackend
from latentd.operations import OpenDone, SamplingParams, StepDone
from latentd.options import SelftestFailed, StartError
from latentd.scheduler import StepPlan
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd.operations import OpenRequest

GREEDY = SamplingParams(seed=0)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 17, 200, 33, 5, 90)
"""Lengths of the scratch sequences, over and over: both sides of the page boundaries."""
CPU_LENGTHS = (1, 64, 5, 3)
"""The same for the cpu, which takes milliseconds a token."""
ALONE_ROWS = 16
"""Rows that are also run alone."""


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

    def require(self) -> SelftestReport:
        """Raise SelftestFailed unless everything was the same."""
        if self.failures:
            raise SelftestFailed("the self-test failed: " + " | ".join(self.failures))
        return self


def run_selftest(engine: Engine) -> SelftestReport:
    """Compare replay with eager, rows alone with rows in a batch, and page orders with each other.

    Raises StartError when the engine has slots in use; counters are reset afterwards.
    """
    if engine.slots.num_used or engine.has_work:
        raise StartError("the self-test needs an engine without slots in use")
    report = SelftestReport()
    probe = _Probe(engine)
    try:
        _check_slab(engine, report)
        probe.open_all()
        _check_buckets(probe, report)
        probe.close_all()
        _check_page_order(probe, report)
    finally:
        probe.clean_up()
    return report


@dataclass
class _Probe:
    """Scratch sequences on an engine, and steps of them in a bucket of choice."""

    engine: Engine
    slots: list[OpenRequest] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buckets = self.engine.info.buckets
        self.has_graphs = not self.engine.backend.eager
        self.on_cpu = self.engine.info.device == "cpu"
        if self.on_cpu:
            self.buckets = tuple(size for size in self.buckets if size <= len(CPU_LENGTHS))

    def prompt(self, length: int, seed: int) -> NDArray[np.int32]:
        """Token ids drawn from a seed."""
        draw = np.random.default_rng(seed).integers(0, self.engine.info.vocab_size, length)
        return draw.astype(np.int32)

    def lengths(self) -> list[int]:
        """As many scratch sequences as the largest bucket, if slots and pages allow."""
        pattern = CPU_LENGTHS if self.on_cpu else LENGTHS
        pages = self.engine.slots.pool.num_pages
        count = min(self.buckets[-1], pages)
        lengths = []
        for idx in range(count):
            most = min(self.engine.info.max_ctx, 64 * (pages - (count - idx - 1))) - 1
            lengths.append(max(0, min(pattern[idx % len(pattern)], most)))
            pages -= num_pages(lengths[-1] + 1)
        return lengths

    def open(self, length: int, seed: int) -> OpenRequest:
        """A scratch sequence with its prompt run in."""
        request = self.engine.admit_open(self.prompt(length, seed), GREEDY, False)
        events = self._run()
        assert isinstance(events[-1], OpenDone), events
        return request

    def open_all(self) -> None:
        """The sequences that stand in every bucket."""
        self.slots = [self.open(length, idx) for idx, length in enumerate(self.lengths())]

    def close_all(self) -> None:
        """Close them and remember the pages to be zeroed."""
        for slot in self.slots:
            self.touched.update(self.engine.slots.slots[slot.slot_id].pages)
            self.engine.close(slot.slot_id, slot.epoch)
        self.slots = []

    def step(
        self, slots: Sequence[OpenRequest], seed: int, bucket: int, eager: bool
    ) -> list[tuple[int, bytes]]:
        """Append one token to each and take it back: sampled token and the logits' bytes."""
        engine = self.engine
        tokens = self.prompt(engine.slots.max_slots, 1000 + seed)
        backend, launches = engine.backend, engine.launches
        backend.eager, launches.buckets = eager or not self.has_graphs, (bucket,)
        try:
            for slot in slots:
                token = int(tokens[slot.slot_id])
                pos = slot.prompt_len
                engine.admit_step(slot.slot_id, slot.epoch, pos, token, None, True)
            events = self._run()
        finally:
            backend.eager, launches.buckets = not self.has_graphs, engine.info.buckets
        found = []
        for slot, done in zip(slots, events, strict=True):
            assert isinstance(done, StepDone)
            assert done.logits is not None
            found.append((done.token, done.logits.tobytes()))
            self.touched.update(engine.slots.slots[slot.slot_id].pages)
            engine.truncate(slot.slot_id, slot.epoch, done.context_len, slot.prompt_len)
        return found

    def clean_up(self) -> None:
        """Close what is open, zero the touched pages, empty the device's block table."""
        self.close_all()
        engine = self.engine
        slab = slab_of(engine)
        for page in self.touched:
            slab[page].zero_()
        if slab.is_cuda:
            torch.cuda.synchronize()
        updates, zero_pages = engine.slots.take_updates()
        plan = StepPlan(0, [], [], [], [], [], [], updates=updates, zero_pages=zero_pages)
        engine.backend.launch(plan, engine.info.buckets[0])
        engine.backend.wait()
        engine.reset_stats()

    def _run(self) -> list[object]:
        events: list[object] = []
        while self.engine.has_work:
            events += self.engine.run()
        return events


def slab_of(engine: Engine) -> torch.Tensor:
    """The page pool's memory, of an engine over a real backend."""
    backend = engine.backend
    assert isinstance(backend, CpuBackend | CudaBackend)
    return backend.runner.buffers.slab


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


def _check_buckets(probe: _Probe, report: SelftestReport) -> None:
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
    lengths = f"contexts of {min(s.prompt_len for s in probe.slots) + 1} to " + str(
        max(s.prompt_len for s in probe.slots) + 1
    )
    if probe.has_graphs:
        report.note("graph = eager", unlike_eager[:5], f"buckets {sizes}; {lengths}")
    report.note("row alone = row in a batch", unlike_alone[:5], f"{len(alone)} rows; {sizes}")
    report.note("logits are finite", [f"{not_finite} rows"] * bool(not_finite), "all")


def _check_page_order(probe: _Probe, report: SelftestReport) -> None:
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
    report.note("page order", differ, f"{num_pages(length + 1)} pages, then others in reverse")
