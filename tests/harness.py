"""Runs single steps of the model without an engine: slots and pages as plain lists, one ring.

Whatever a test wants to arrange (page order, batch mates, chunk sizes) is an argument here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from latentd.model.activations import Activations
from latentd.model.forward import ATTENTION_ROWS, Model, decode_step, prompt_chunk
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM, num_pages
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.model.config import ModelConfig
    from latentd.model.weights import Weights
    from latentd_kernels.ops import Numerics, Ops
    from latentd_kernels.staging import EntryViews


@dataclass
class Seat:
    """A slot's tokens so far and the pages that hold them."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What one row of a step gave: float32 logits [vocab] on the host, and the sampled token."""

    logits: torch.Tensor
    token: int
    logprob: float


class Harness:
    """One model with its buffers on one device. Pages are claimed from the end of `free`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        numerics: Numerics = "f32",
        max_ctx: int = 512,
        max_slots: int = 4,
        max_rows: int = 256,
        pages: int | None = None,
    ) -> None:
        self.config, self.device = config, device
        torch.set_num_threads(1)  # threads of tiny products only wait for each other
        self.model = Model(config, weights)
        slot_pages = num_pages(max_ctx)
        pages = pages or max_slots * slot_pages
        layout = RingLayout(max_rows, 64, 64)
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with self._on_stream():
            self.ring = StepRing(layout, device)
            self.inputs = allocate_inputs(layout, max_slots, slot_pages, device)
            shape = (pages, config.num_layers, PAGE_SIZE, ROW_DIM)
            self.slab = torch.zeros(shape, dtype=dtype, device=device)
            self.acts = Activations.allocate(config, max_rows, ATTENTION_ROWS, device, dtype)
            self.workspace = allocate_workspace(
                ATTENTION_ROWS, max_ctx, config.num_heads, numerics, device, dtype
            )
        self.ops: Ops = self._make_ops(numerics)
        self.seats = [Seat() for _ in range(max_slots)]
        self.free = list(range(pages))[::-1]
        self.steps = 0

    def step(self, tokens: Sequence[tuple[int, int]], rows: int | None = None) -> list[Row]:
        """Append one token to each (slot, token) in one step of `rows` rows (the rest padding)."""
        bucket = rows or len(tokens)
        entry = self._stage([(slot, [token]) for slot, token in tokens], bucket)
        with self._on_stream():
            decode_step(self.ops, self.model, self.acts, self.workspace, self.slab, bucket)
        return self._results(entry, len(tokens))

    def prompt(self, slot: int, tokens: Sequence[int], chunk: int = 256) -> Row:
        """Append a prompt in chunks of at most `chunk` rows; returns the last token's row."""
        for first in range(0, len(tokens), chunk):
            part = list(tokens[first : first + chunk])
            last = first + len(part) == len(tokens)
            entry = self._stage([(slot, part)], len(part))
            with self._on_stream():
                prompt_chunk(
                    self.ops, self.model, self.acts, self.workspace, self.slab, len(part), last
                )
            results = self._results(entry, int(last))
        return results[0]

    def force(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens one step each; their logits [len(tokens), vocab] on the host."""
        return torch.stack([self.step([(slot, token)])[0].logits for token in tokens])

    def generate(self, slot: int, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation of a prompt by `count` tokens."""
        tokens = [self.prompt(slot, prompt).token]
        while len(tokens) < count:
            tokens.append(self.step([(slot, tokens[-1])])[0].token)
        return tokens

    def close(self, slot: int) -> None:
        """Give a slot's pages back, dirty, and forget its tokens."""
        self.free.extend(self.seats[slot].pages)
        self.seats[slot] = Seat()

    def _stage(self, runs: list[tuple[int, list[int]]], bucket: int) -> EntryViews:
        """Write the ring entry of a step that appends each run of tokens to its slot."""
        entry = self.ring.entry(self.steps)
        entry.clear(bucket)
        row = updates = 0
        for slot, tokens in runs:
            seat = self.seats[slot]
            if not seat.tokens:
                entry.updates[updates] = (slot, 0, self.inputs.block_table.shape[1], -1)
                updates += 1
            for token in tokens:
                position = len(seat.tokens)
                if position % PAGE_SIZE == 0:
                    page = self.free.pop()
                    entry.updates[updates] = (slot, len(seat.pages), 1, page)
                    entry.zero_pages[entry.num_zero_pages[0]] = page
                    entry.num_zero_pages[0] += 1
                    updates += 1
                    seat.pages.append(page)
                seat.tokens.append(token)
                entry.token_ids[row], entry.slot_idx[row] = token, slot
                entry.context_len[row] = position + 1
                page_row = seat.pages[-1] * self.config.num_layers * PAGE_SIZE
                entry.kv_row[row] = page_row + position % PAGE_SIZE
                row += 1
        entry.num_updates[0] = updates
        return entry

    def _results(self, entry: EntryViews, count: int) -> list[Row]:
        if self.stream is not None:
            self.stream.synchronize()
        self.steps += 1
        assert int(entry.step[0]) == self.steps
        logits = self.acts.logits[:count].cpu().clone()
        return [
            Row(logits[i], int(entry.tokens[i]), float(entry.logprobs[i])) for i in range(count)
        ]

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def _make_ops(self, numerics: Numerics) -> Ops:
        if self.stream is None:
            from latentd_kernels.reference.ops import ReferenceOps

            return ReferenceOps(self.inputs, self.ring, numerics)
        from latentd_kernels.cuda_ops import CudaOps
        from launching import library

        self.stream.synchronize()
        return CudaOps(library(), self.inputs, self.ring, numerics, self.stream.cuda_stream)
