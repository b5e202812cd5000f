"""Staging of plans into a ring entry, and the reading of its outputs: plain host memory.

Python sees the fields as memoryviews: an item costs a fraction of a numpy access. What the entry
still holds from its last use is not written again. Nobody else may write the entry's inputs.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from latentd.changes import NO_CHANGES
from latentd.plans import StepOutputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd.changes import Changes
    from latentd.operations import SamplingParams
    from latentd.plans import StepPlan
    from latentd_kernels.staging import EntryViews

_INTS: Final = [Struct(f"={rows}i") for rows in range(129)]
_LONGS: Final = [Struct(f"={rows}q") for rows in range(129)]
"""Columns of 0 to 128 decode rows, by their number."""


class Stager:
    """Writes and reads one entry. `step` is a view of its published number."""

    def __init__(self, entry: EntryViews) -> None:
        self.step: memoryview = _view(entry.step)
        self._entry = entry
        self._token_ids, self._slot_idx = _view(entry.token_ids), _view(entry.slot_idx)
        self._context_len, self._kv_row = _view(entry.context_len), _view(entry.kv_row)
        self._temperature, self._top_k = _view(entry.temperature), _view(entry.top_k)
        self._top_p, self._min_p = _view(entry.top_p), _view(entry.min_p)
        self._seed = _view(entry.seed)
        self._tokens, self._logprobs = _view(entry.tokens), _view(entry.logprobs)
        self._start_ns, self._end_ns = _view(entry.start_ns), _view(entry.end_ns)
        capacity = len(entry.token_ids)
        self._sampling: list[SamplingParams | None] = [None] * capacity  # as written, by row
        self._used = capacity  # rows from here on hold padding
        self._has_lists = True  # page lists of the last use are to be emptied

    def stage(self, plan: StepPlan, bucket: int) -> None:
        """Write a plan; rows plan.rows .. bucket - 1 become padding."""
        rows = plan.rows
        if rows > self._used:
            self._used = rows
        elif rows < bucket and rows < self._used:
            self._pad(rows)
        if plan.is_chunk:
            self._write_chunk(plan)
        else:
            self._write_rows(plan, rows)
            written, row = self._sampling, 0
            for params in plan.sampling:
                if written[row] is not params:
                    self._write_sampling(row, params)
                row += 1  # noqa: SIM113 (enumerate makes a tuple a row)
        if plan.changes is not NO_CHANGES or self._has_lists:
            self._write_lists(plan.changes)

    def _write_rows(self, plan: StepPlan, rows: int) -> None:
        slot_idx: Any = plan.slot_idx  # a sequence, as it is no chunk
        if rows == 1:
            self._token_ids[0] = plan.token_ids[0]
            self._slot_idx[0] = slot_idx[0]
            self._context_len[0] = plan.context_len[0]
            self._kv_row[0] = plan.kv_row[0]
            return
        pack = _INTS[rows].pack_into
        pack(self._token_ids, 0, *plan.token_ids)
        pack(self._slot_idx, 0, *slot_idx)
        pack(self._context_len, 0, *plan.context_len)
        _LONGS[rows].pack_into(self._kv_row, 0, *plan.kv_row)

    def _write_sampling(self, row: int, params: SamplingParams) -> None:
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed or 0  # admission has drawn one
        self._sampling[row] = params

    def _write_chunk(self, plan: StepPlan) -> None:
        entry, rows = self._entry, plan.rows
        entry.token_ids[:rows] = plan.token_ids
        entry.slot_idx[:rows] = plan.slot_idx
        entry.context_len[:rows] = plan.context_len
        entry.kv_row[:rows] = plan.kv_row
        for column, off in (  # only the last row's token is drawn
            (entry.temperature, 0), (entry.top_k, 0), (entry.top_p, 1), (entry.min_p, 0),
            (entry.seed, 0),
        ):  # fmt: skip
            column[: rows - 1] = off
        self._sampling[: rows - 1] = [None] * (rows - 1)
        self._write_sampling(rows - 1, plan.sampling[0])

    def _write_lists(self, changes: Changes) -> None:
        entry, updates, zero_pages = self._entry, changes.updates, changes.zero_pages
        entry.num_updates[0] = len(updates)
        if updates:
            entry.updates[: len(updates)] = updates
        entry.num_zero_pages[0] = len(zero_pages)
        if zero_pages:
            entry.zero_pages[: len(zero_pages)] = zero_pages
        self._has_lists = bool(updates or zero_pages)

    def _pad(self, rows: int) -> None:
        """Make the rows from `rows` on padding."""
        self._entry.clear(self._used, start=rows)
        self._sampling[rows : self._used] = [None] * (self._used - rows)
        self._used = rows

    def outputs(self, plan: StepPlan, logits: dict[int, NDArray[np.float32]]) -> StepOutputs:
        """Read the outputs of the plan staged last, which must be complete."""
        times = self._start_ns[0], self._end_ns[0]
        rows = plan.rows if not plan.is_chunk else int(plan.is_last)
        if plan.attends:
            return StepOutputs([], [], {}, *times)
        if rows == 1:
            return StepOutputs([self._tokens[0]], [self._logprobs[0]], logits, *times)
        tokens, logprobs = self._tokens[:rows].tolist(), self._logprobs[:rows].tolist()
        return StepOutputs(tokens, logprobs, logits, *times)


def _view(column: NDArray[Any]) -> Any:
    """A memoryview of a column; its items are the ints or floats that the column's dtype says."""
    return memoryview(column.data)
