"""Scratch sequences on an idle engine, for the self-test: opened, stepped in any bucket, erased."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd.backend_cuda import CudaBackend
from latentd.backend_steps import CpuBackend
from latentd.extras import NO_EXTRAS
from latentd.operations import (
    OpenDone,
    SamplingParams,
    StepRequest,
    StreamRequest,
    StreamTokens,
)
from latentd.plans import StepPlan
from latentd_kernels.geometry import PAGE_SIZE, num_pages

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


@dataclass
class Probe:
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
            most = min(self.engine.info.max_ctx, PAGE_SIZE * (pages - (count - idx - 1))) - 1
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
                request = StepRequest(slot.slot_id, slot.epoch, pos, True, NO_EXTRAS)
                engine.admit_step(request, token, None)
            events = self._run()
        finally:
            backend.eager, launches.buckets = not self.has_graphs, engine.info.buckets
        found = []
        for slot, done in zip(slots, events, strict=True):
            assert isinstance(done, StepRequest)
            assert done.logits is not None
            found.append((done.token, done.logits.tobytes()))
            self.touched.update(engine.slots.slots[slot.slot_id].pages)
            engine.truncate(slot.slot_id, slot.epoch, done.context_len, slot.prompt_len)
        return found

    def room(self, slot: OpenRequest) -> int:
        """Tokens that a slot's prompt can be followed by."""
        pages = self.engine.slots.pool.num_free + num_pages(slot.prompt_len)
        return min(self.engine.info.max_ctx, pages * PAGE_SIZE) - slot.prompt_len

    def follow(self, slot: OpenRequest, steps: int, ahead: bool) -> list[tuple[int, float]]:
        """Decode behind a slot's prompt, as a stream that runs ahead or step by step, and take it
        back: the sampled tokens and their log-probabilities."""
        engine, pos = self.engine, slot.prompt_len
        token = int(self.prompt(1, 3000)[0])
        events: list[object] = []
        if ahead:
            request = StreamRequest(slot.slot_id, slot.epoch, pos, steps, frozenset(), steps)
            engine.admit_stream(request, token, None)
            events += self._run()
        for at in range(pos, pos if ahead else pos + steps):
            step = StepRequest(slot.slot_id, slot.epoch, at, False, NO_EXTRAS)
            engine.admit_step(step, token if at == pos else None, None)
            events += self._run()
        self.touched.update(engine.slots.slots[slot.slot_id].pages)
        engine.truncate(slot.slot_id, slot.epoch, pos + steps, pos)
        found: list[tuple[int, float]] = []
        for event in events:
            if isinstance(event, StreamTokens):
                found += zip(event.tokens, event.logprobs, strict=True)
            else:
                assert isinstance(event, StepRequest)
                found.append((event.token, event.logprob))
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
        plan = StepPlan(0, [], [], [], [], [], [], changes=engine.slots.changes.take())
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
