from __future__ import annotations

import numpy as np
import pytest
import torch

from latentd_kernels.geometry import num_splits
from latentd_kernels.reference.steps import ReferenceSteps
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

CPU = torch.device("cpu")
LAYOUT = RingLayout(max_rows=5, max_updates=3, max_zero_pages=2)


def make_ops(layout: RingLayout = LAYOUT) -> ReferenceSteps:
    return ReferenceSteps(allocate_inputs(layout, 4, 10, CPU), StepRing(layout, CPU), "f32")


@pytest.mark.parametrize("rows", [1, 4, 5, 128, 130])
def test_every_field_of_every_entry_starts_on_its_own_16_bytes(rows: int) -> None:
    layout = RingLayout(rows, 7, 9, entries=3)
    ring = StepRing(layout, CPU)
    assert layout.entry_bytes % 16 == 0
    seen: set[int] = set()
    for step in range(3):
        entry = ring.entry(step)
        for name, _, _ in layout.fields():
            if name in ("padding_1", "padding_2", "num_updates", "num_zero_pages", "end_ns"):
                continue
            address = getattr(entry, name).ctypes.data - ring.host.data_ptr()
            assert address % 16 == 0, name
            assert address not in seen
            seen.add(address)
    assert ring.entry(3) is ring.entry(0)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 1, 1)])
def test_a_ring_that_cannot_hold_a_step_is_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="sizes >= 1 and entries >= 2"):
        RingLayout(*sizes)


def test_clear_makes_padding_rows_and_empty_lists() -> None:
    entry = StepRing(LAYOUT, CPU).entry(0)
    for name in ("token_ids", "slot_idx", "context_len", "kv_row", "top_k", "min_p"):
        getattr(entry, name)[:] = 7
    entry.num_updates[0] = entry.num_zero_pages[0] = 1
    entry.clear(3)
    assert entry.slot_idx.tolist() == [-1] * 3 + [7] * 5
    assert entry.kv_row[:3].tolist() == entry.token_ids[:3].tolist() == [-1] * 3
    assert entry.context_len[:3].tolist() == [0] * 3
    assert entry.top_p[:3].tolist() == [1] * 3
    assert entry.num_updates[0] == entry.num_zero_pages[0] == 0


def test_stage_copies_rows_applies_runs_in_order_and_lists_pages() -> None:
    ops = make_ops()
    entry = ops.ring.entry(0)
    entry.clear(3)
    entry.slot_idx[:2] = 2, 0
    entry.token_ids[:2] = -1, 8  # a row that runs ahead of the host, and one that does not
    ops.inputs.last_token[:] = torch.tensor([5, 6, 7, 8])
    entry.context_len[:2] = 65, 1
    entry.kv_row[:2] = 1 << 40, 5
    entry.seed[0] = (1 << 64) - 1
    entry.updates[:3] = [(2, 0, 10, -1), (2, 0, 2, 7), (2, 1, 1, 9)]
    entry.num_updates[0] = 3
    entry.zero_pages[:2] = 7, 9
    entry.num_zero_pages[0] = 2
    ops.stage(3)
    inputs = ops.inputs
    assert inputs.slot_idx[:3].tolist() == [2, 0, -1]
    assert inputs.token_ids[:3].tolist() == [7, 8, -1]
    assert inputs.kv_row[:3].tolist() == [1 << 40, 5, -1]
    assert inputs.seed[0] == -1
    assert inputs.block_table[2].tolist() == [7, 9] + [-1] * 8
    assert inputs.zero_pages[: int(inputs.num_zero_pages)].tolist() == [7, 9]


def test_split_start_is_the_running_sum_of_splits() -> None:
    ops = make_ops()
    lengths = [64 * 17, 0, 1, 64 * 70, 300]
    entry = ops.ring.entry(0)
    entry.clear(5)
    entry.context_len[:5] = lengths
    ops.stage(5)
    expected = np.cumsum([0, *map(num_splits, lengths)])
    assert ops.inputs.split_start[:6].tolist() == expected.tolist()


def test_publish_writes_the_results_and_the_step_number_of_its_entry() -> None:
    ops = make_ops()
    for step in range(3):
        ops.ring.entry(step).clear(2)
        ops.stage(2)
        ops.ring.tokens[:2] = torch.tensor([step, 100])
        ops.ring.logprobs[:2] = -0.5
        ops.publish(2)
        entry = ops.ring.entry(step)
        assert entry.tokens[:2].tolist() == [step, 100]
        assert entry.logprobs[:2].tolist() == [-0.5, -0.5]
        assert entry.step[0] == step + 1
        assert 0 < entry.start_ns[0] < entry.end_ns[0]
    assert int(ops.ring.step_counter) == 3
    assert ops.ring.entry(1).step[0] == 2  # the other entry is not touched


def test_zero_pages_clears_the_listed_pages_only() -> None:
    ops = make_ops()
    slab = torch.ones(4, 2, 64, 576)
    ops.inputs.zero_pages[:2] = torch.tensor([3, 1])
    ops.inputs.num_zero_pages[0] = 1
    ops.zero_pages(slab)
    assert [bool(page.any()) for page in slab] == [True, True, True, False]
