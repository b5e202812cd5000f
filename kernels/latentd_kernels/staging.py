"""The step ring: byte layout of what host and device hand each other every step, for both backends.

The host fills an entry, launches a step and waits for the entry's step number; `stage` and
`publish` read and write the same bytes on the device. csrc/staging.cu repeats the order below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd_kernels.ops import StepInputs
from latentd_kernels.scores import ScoreRing
from latentd_kernels.work_plan import MAX_CTAS, ROW_WORDS, WORK_WORDS, num_calls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd_kernels.limits import LimitRing

SAMPLE_CHUNK = 4096
"""Vocabulary ids that one CTA of the sampler's first pass covers (csrc/sampling.cu)."""
MAX_SAMPLE_CHUNKS = 128
"""Most such CTAs a row: a vocabulary of up to 524,288."""


@dataclass(frozen=True)
class RingLayout:
    """Sizes of a ring entry. Rows and zero pages are rounded up so that every field starts on 16
    bytes; `max_rows` covers decode buckets and prompt chunks alike."""

    max_rows: int
    max_updates: int
    max_zero_pages: int
    entries: int = 2

    def __post_init__(self) -> None:
        """Refuse sizes that cannot hold a step."""
        if min(self.max_rows, self.max_updates, self.max_zero_pages) < 1 or self.entries < 2:
            raise ValueError(f"a step ring needs sizes >= 1 and entries >= 2, not {self}")

    @property
    def row_capacity(self) -> int:
        """Rows an entry has room for."""
        return -(-self.max_rows // 4) * 4

    @property
    def zero_capacity(self) -> int:
        """Pages to zero an entry has room for."""
        return -(-self.max_zero_pages // 4) * 4

    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, numpy dtype and shape of each field, in the order of the bytes."""
        rows = (self.row_capacity,)
        return [
            ("kv_row", "<i8", rows),
            ("seed", "<u8", rows),
            ("token_ids", "<i4", rows),
            ("slot_idx", "<i4", rows),
            ("context_len", "<i4", rows),
            ("top_k", "<i4", rows),
            ("temperature", "<f4", rows),
            ("top_p", "<f4", rows),
            ("min_p", "<f4", rows),
            ("num_updates", "<i4", (1,)),
            ("num_zero_pages", "<i4", (1,)),
            ("padding_1", "<i4", (2,)),
            ("updates", "<i4", (self.max_updates, 4)),
            ("zero_pages", "<i4", (self.zero_capacity,)),
            ("step", "<i8", (1,)),
            ("end_ns", "<i8", (1,)),
            ("start_ns", "<i8", (1,)),
            ("padding_2", "<i8", (1,)),
            ("tokens", "<i4", rows),
            ("logprobs", "<f4", rows),
        ]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, a multiple of 16."""
        return sum(np.dtype(dtype).itemsize * prod(shape) for _, dtype, shape in self.fields())


@dataclass(frozen=True)
class EntryViews:
    """Numpy views of one ring entry; writing them is staging a step, reading them its result."""

    token_ids: NDArray[np.int32]  # -1 with a slot: what the slot sampled last
    slot_idx: NDArray[np.int32]
    context_len: NDArray[np.int32]
    kv_row: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    updates: NDArray[np.int32]  # [max_updates, 4] runs (slot, first_idx, count, page_id), in order
    num_updates: NDArray[np.int32]  # [1]
    zero_pages: NDArray[np.int32]
    num_zero_pages: NDArray[np.int32]  # [1]
    tokens: NDArray[np.int32]  # output, -1 on padding rows
    logprobs: NDArray[np.float32]  # output, natural log, 0 on padding rows
    start_ns: NDArray[np.int64]  # [1] output, the device's clock when stage began
    end_ns: NDArray[np.int64]  # [1] output, the same clock in publish
    step: NDArray[np.int64]  # [1] output, written last: step number + 1; 0 = never

    def clear(self, stop: int, start: int = 0) -> None:
        """Make the rows `start` .. `stop` - 1 padding and the lists empty; outputs stay."""
        for field, value in (
            (self.token_ids, -1),
            (self.slot_idx, -1),
            (self.context_len, 0),
            (self.kv_row, -1),
            (self.temperature, 0),
            (self.top_k, 0),
            (self.top_p, 1),
            (self.min_p, 0),
            (self.seed, 0),
        ):
            field[start:stop] = value
        self.num_updates[0] = 0
        self.num_zero_pages[0] = 0


class StepRing:
    """The ring in host memory, and the few device buffers that live from stage to publish."""

    def __init__(
        self, layout: RingLayout, device: torch.device, limits: LimitRing | None = None
    ) -> None:
        """On cuda the host bytes are pinned and mapped: their address is valid on the device.
        Without `limits` no slot has any."""
        cuda = device.type == "cuda"
        rows = layout.row_capacity
        self.layout = layout
        self.host = torch.zeros(
            layout.entries * layout.entry_bytes, dtype=torch.uint8, pin_memory=cuda
        )
        self.step_counter = torch.zeros(1, dtype=torch.int64, device=device)  # steps published
        self.start_ns = torch.zeros(1, dtype=torch.int64, device=device)  # clock at stage
        self.tokens = torch.full((rows,), -1, dtype=torch.int32, device=device)  # set by sample
        self.logprobs = torch.zeros(rows, dtype=torch.float32, device=device)  # set by sample
        # Maximum and log of the sum of exponentials of each row, set by sample, read by score.
        self.normalizers = torch.zeros((rows, 2), dtype=torch.float32, device=device)
        self.limits = limits
        self.scores = ScoreRing(rows, layout.entries, device)
        # Maximum, its id and the sum of exponentials of every vocabulary chunk (sampler's pass 1).
        self.sample_parts = torch.zeros(
            (rows if cuda else 0, MAX_SAMPLE_CHUNKS, 4), dtype=torch.float32, device=device
        )
        self._entries = [self._views(i) for i in range(layout.entries)]

    def entry(self, step: int) -> EntryViews:
        """The entry that step number `step` (0, 1, ...) reads and writes."""
        return self._entries[step % self.layout.entries]

    def _views(self, entry_idx: int) -> EntryViews:
        buffer = self.host.numpy()
        offset = entry_idx * self.layout.entry_bytes
        views = {}
        for name, dtype, shape in self.layout.fields():
            size = np.dtype(dtype).itemsize * prod(shape)
            views[name] = buffer[offset : offset + size].view(dtype).reshape(shape)
            offset += size
        del views["padding_1"], views["padding_2"]
        return EntryViews(**views)


def allocate_inputs(
    layout: RingLayout, max_slots: int, max_pages: int, device: torch.device
) -> StepInputs:
    """Static buffers that `stage` fills, holding padding rows and an empty block table."""

    def filled(dtype: torch.dtype, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    rows = layout.row_capacity
    return StepInputs(
        token_ids=filled(torch.int32, -1, rows),
        slot_idx=filled(torch.int32, -1, rows),
        last_token=filled(torch.int32, 0, max_slots),
        context_len=filled(torch.int32, 0, rows),
        kv_row=filled(torch.int64, -1, rows),
        temperature=filled(torch.float32, 0, rows),
        top_k=filled(torch.int32, 0, rows),
        top_p=filled(torch.float32, 1, rows),
        min_p=filled(torch.float32, 0, rows),
        seed=filled(torch.int64, 0, rows),
        split_start=filled(torch.int32, 0, rows + 1),
        row_plan=filled(torch.int32, 0, rows, ROW_WORDS),
        work=filled(torch.int32, 0, num_calls(rows) * MAX_CTAS, WORK_WORDS),
        block_table=filled(torch.int32, -1, max_slots, max_pages),
        zero_pages=filled(torch.int32, -1, layout.zero_capacity),
        num_zero_pages=filled(torch.int32, 0, 1),
    )
