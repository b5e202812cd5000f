from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from latentd_kernels.ops import StepInputs
from latentd_kernels.reference.steps import ReferenceSteps
from latentd_kernels.staging import EntryViews, RingLayout, StepRing, allocate_inputs
from launching import CUDA, make_ops, replay

pytestmark = pytest.mark.gpu

LAYOUT = RingLayout(max_rows=130, max_updates=700, max_zero_pages=9, entries=3)


def fill(entry: EntryViews, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    entry.clear(rows)
    entry.token_ids[:rows] = rng.integers(-1, 1000, rows)
    entry.slot_idx[:rows] = rng.integers(-1, 16, rows)
    entry.context_len[:rows] = rng.integers(0, 300_000, rows)
    entry.kv_row[:rows] = rng.integers(-1, 1 << 40, rows)
    entry.temperature[:rows] = rng.random(rows)
    entry.top_k[:rows] = rng.integers(0, 99, rows)
    entry.top_p[:rows] = rng.random(rows)
    entry.min_p[:rows] = rng.random(rows)
    entry.seed[:rows] = rng.integers(0, 1 << 64, rows, dtype=np.uint64)
    updates = int(rng.integers(0, 700))
    first = rng.integers(0, 1500, updates)
    count = rng.integers(0, 1500 - first + 1)
    page = rng.integers(-1, 5000, updates)
    entry.updates[:updates] = np.stack([rng.integers(0, 16, updates), first, count, page], 1)
    entry.num_updates[0] = updates
    zeroes = int(rng.integers(0, 10))
    entry.zero_pages[:zeroes] = rng.integers(0, 5000, zeroes)
    entry.num_zero_pages[0] = zeroes


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_stage_and_publish_do_what_the_reference_does(captured: bool) -> None:
    ops = make_ops(LAYOUT, max_slots=16, max_pages=1500)
    cpu = torch.device("cpu")
    reference = ReferenceSteps(allocate_inputs(LAYOUT, 16, 1500, cpu), StepRing(LAYOUT, cpu), "f32")
    ops.inputs.slot_idx.fill_(-1)
    for backend in (ops, reference):
        backend.inputs.last_token.copy_(torch.arange(16) * 7)
    for step in range(5):
        rows = (130, 1, 64, 7, 128)[step]
        for backend in (ops, reference):
            fill(backend.ring.entry(step), rows, step)
            backend.ring.tokens.copy_(torch.arange(len(backend.ring.tokens)) + step)
            backend.ring.logprobs.copy_(torch.arange(len(backend.ring.tokens)) * 0.5)
        reference.stage(rows)
        reference.publish(rows)

        def run(rows: int = rows) -> None:
            ops.stage(rows)
            ops.publish(rows)

        if captured:
            replay(run)
        else:
            run()
            torch.cuda.synchronize()
        for field in fields(StepInputs):
            ours = getattr(ops.inputs, field.name).cpu()
            assert torch.equal(ours, getattr(reference.inputs, field.name)), (step, field.name)
        ours, theirs = ops.ring.entry(step), reference.ring.entry(step)
        assert ours.step[0] == theirs.step[0] == step + 1
        assert 0 < ours.end_ns[0] - ours.start_ns[0] < 10**9
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    assert int(ops.ring.step_counter) == 5


def test_zero_pages_clears_claimed_pages_and_no_other() -> None:
    ops = make_ops()
    slab = torch.full((12, 3, 64, 576), torch.nan, dtype=torch.bfloat16, device=CUDA)
    ops.zero_pages(slab)  # none claimed
    assert slab.isnan().all()
    ops.inputs.zero_pages[:3] = torch.tensor([11, 0, 5], device=CUDA, dtype=torch.int32)
    ops.inputs.num_zero_pages.fill_(3)
    replay(lambda: ops.zero_pages(slab))
    zeroed = (slab == 0).all(dim=3).all(dim=2).all(dim=1)
    assert zeroed.nonzero().flatten().tolist() == [0, 5, 11]
    assert slab[~zeroed].isnan().all()
