from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentd.changes import Changes
from latentd.operations import SamplingParams
from latentd.plans import StepPlan
from latentd.stager import Stager
from latentd_kernels.staging import RingLayout, StepRing

if TYPE_CHECKING:
    from latentd_kernels.staging import EntryViews

CAPACITY = 16
PARAMS = [SamplingParams(seed=1), SamplingParams(0.7, 5, 0.9, 0.1, (1 << 64) - 1)]
COLUMNS = ("token_ids", "slot_idx", "context_len", "kv_row", "temperature", "top_k", "top_p",
           "min_p", "seed")  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """A plan of decode rows or of a prompt chunk, and its bucket."""
    rows = draw(st.integers(0, CAPACITY))
    bucket = draw(st.integers(rows, CAPACITY))
    ids = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=rows, max_size=rows))
    pages = draw(st.lists(st.integers(0, 99), max_size=3))
    updates = [(1, idx, 1, page) for idx, page in enumerate(pages)]
    sampling = [draw(st.sampled_from(PARAMS)) for _ in range(rows)]
    if rows and draw(st.booleans()):
        lengths, kv_rows = np.arange(rows, dtype=np.int32), np.arange(rows, dtype=np.int64) << 33
        return StepPlan(
            rows, [], np.array(ids, np.int32), 3, lengths, kv_rows, sampling[:1],
            is_chunk=True, changes=Changes(updates, pages),
        ), rows  # fmt: skip
    kv_row = [token << 31 for token in ids]
    return StepPlan(
        rows, [], ids, ids[::-1], ids, kv_row, sampling, changes=Changes(updates, pages)
    ), bucket


def write(entry: EntryViews, plan: StepPlan, bucket: int) -> None:
    """The same as staging, field by field on a cleared entry."""
    rows = plan.rows
    entry.clear(bucket)
    entry.token_ids[:rows] = plan.token_ids
    entry.slot_idx[:rows] = plan.slot_idx
    entry.context_len[:rows] = plan.context_len
    entry.kv_row[:rows] = plan.kv_row
    for row in range(rows - 1 if plan.is_chunk else 0, rows):
        params = plan.sampling[0 if plan.is_chunk else row]
        entry.temperature[row], entry.top_k[row] = params.temperature, params.top_k
        entry.top_p[row], entry.min_p[row] = params.top_p, params.min_p
        entry.seed[row] = params.seed or 0
    for idx, update in enumerate(plan.changes.updates):
        entry.updates[idx] = update
    entry.num_updates[0] = len(plan.changes.updates)
    entry.zero_pages[: len(plan.changes.zero_pages)] = plan.changes.zero_pages
    entry.num_zero_pages[0] = len(plan.changes.zero_pages)


@given(st.lists(plans(), min_size=1, max_size=6))
def test_an_entry_holds_the_plan_whatever_it_held_before(
    staged: list[tuple[StepPlan, int]],
) -> None:
    layout, cpu = RingLayout(CAPACITY, 8, 8), torch.device("cpu")
    entry, expected = StepRing(layout, cpu).entry(0), StepRing(layout, cpu).entry(0)
    stager = Stager(entry)
    for plan, bucket in staged:
        stager.stage(plan, bucket)
        write(expected, plan, bucket)
        for name in COLUMNS:
            ours, theirs = getattr(entry, name)[:bucket], getattr(expected, name)[:bucket]
            assert ours.tolist() == theirs.tolist(), name
        for count, items in (("num_updates", "updates"), ("num_zero_pages", "zero_pages")):
            num = int(getattr(expected, count)[0])
            assert int(getattr(entry, count)[0]) == num
            assert getattr(entry, items)[:num].tolist() == getattr(expected, items)[:num].tolist()


def test_outputs_are_those_of_the_staged_rows() -> None:
    entry = StepRing(RingLayout(CAPACITY, 8, 8), torch.device("cpu")).entry(0)
    stager = Stager(entry)
    entry.tokens[:3], entry.logprobs[:3] = [4, 5, 6], [-0.5, -1, -2]
    entry.start_ns[0], entry.end_ns[0] = 7000, 8500
    for rows in (1, 3):
        outputs = stager.outputs(StepPlan(rows, [], [], [], [], [], []), {})
        assert outputs.tokens == [4, 5, 6][:rows]
        assert outputs.logprobs == [-0.5, -1, -2][:rows]
        assert outputs.device_us == 1.5
