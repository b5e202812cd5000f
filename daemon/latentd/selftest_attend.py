"""The part of the self-test that looks at attention for clients: runs of rows of a scratch slot in
every bucket, which must have the bits of an eager run and of rows that come one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd.attending import Written
from latentd.operations import AttendDone, SamplingParams
from latentd.selftest_probe import CPU_LENGTHS, slab_of
from latentd_kernels.geometry import PAGE_SIZE, ROPE_DIM, ROW_DIM

if TYPE_CHECKING:
    from latentd.attending import Bits
    from latentd.engine import Engine
    from latentd.selftest import SelftestReport

ALONE_ROWS = 8
"""Rows that are also run one by one."""


def check_attends(engine: Engine, report: SelftestReport) -> None:
    """Note whether all buckets have the bits of eager runs and of single rows."""
    scratch = _Scratch(engine)
    try:
        most = min(engine.info.max_ctx, engine.slots.pool.num_pages * PAGE_SIZE)
        if engine.info.device == "cpu":
            most = min(most, len(CPU_LENGTHS))
        rows = sorted({min(bucket, most) for bucket in engine.info.buckets})
        alone = [scratch.run(row, row + 1) for row in range(min(ALONE_ROWS, rows[-1]))]
        unlike_eager, unlike_alone = [], []
        for count in rows:
            found = scratch.again(count)
            if not engine.backend.eager and found != scratch.again(count, eager=True):
                unlike_eager.append(f"{count} rows")
            if found[: len(alone)] != [o for run in alone for o in run][:count]:
                unlike_alone.append(f"{count} rows")
    finally:
        scratch.clean_up()
    sizes = ", ".join(map(str, rows))
    if not engine.backend.eager:
        report.note("attend, graph = eager", unlike_eager, f"{sizes} rows have the same bits")
    passed = f"{len(alone)} rows have the same bits one by one and in runs of {sizes}"
    report.note("attend, row alone = row in a run", unlike_alone, passed)


class _Scratch:
    """A slot whose positions are written in the last layer only, as if the others had been."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slot = engine.admit_open([], SamplingParams(seed=0), False)
        self._touched: set[int] = set()
        self._run_all()

    def again(self, count: int, eager: bool = False) -> list[bytes]:
        """The results of the first positions, all in one run."""
        engine, slot = self._engine, self._slot
        length = engine.slots.slots[slot.slot_id].length
        engine.truncate(slot.slot_id, slot.epoch, length, 0)
        was, engine.backend.eager = engine.backend.eager, eager or engine.backend.eager
        try:
            return self.run(0, count)
        finally:
            engine.backend.eager = was

    def run(self, first: int, stop: int) -> list[bytes]:
        """The results of positions first .. stop - 1, of which `first` is the slot's length."""
        engine, slot = self._engine, self._slot
        info = engine.info
        q, latent = [], []
        for pos in range(first, stop):
            rng = np.random.default_rng(pos)
            q.append(rng.standard_normal((info.heads, info.nope_dim + ROPE_DIM), np.float32))
            latent.append(rng.standard_normal(ROW_DIM, np.float32))
        rows = [(slot.slot_id, slot.epoch, pos) for pos in range(first, stop)]
        bits = (self._bits(np.stack(values)) for values in (q, latent))
        seat = engine.slots.slots[slot.slot_id]
        seat.written = Written(first, [stop] * (info.layers - 1))
        engine.admit_attend(info.layers - 1, rows, *bits)
        done = self._run_all()[-1]
        assert isinstance(done, AttendDone)
        self._touched.update(seat.pages)
        return [o.tobytes() for o in done.o]

    def clean_up(self) -> None:
        """Close the slot and zero its pages."""
        engine, slab = self._engine, slab_of(self._engine)
        engine.close(self._slot.slot_id, self._slot.epoch)
        for page in self._touched:
            slab[page].zero_()
        if slab.is_cuda:
            torch.cuda.synchronize()
        engine.reset_stats()

    def _bits(self, values: np.ndarray) -> Bits:
        if self._engine.info.dtype == "float32":
            return values
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def _run_all(self) -> list[object]:
        events: list[object] = []
        while self._engine.has_work:
            events += self._engine.run()
        return events
