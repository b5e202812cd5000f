"""A fake engine: the real admission, scheduling and paging over a backend that needs no model.

The next token is a function of the tokens before it (`next_token`), read back through the block
table and the staged rows, so that a wrong page or a lost update shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from latentd.backend_steps import seat_limits
from latentd.engine import Engine
from latentd.extras import Scores
from latentd.operations import DeviceFault, ModelInfo
from latentd.pages import PagePool
from latentd.plans import StepOutputs, StepPlan
from latentd.slots import SlotTable
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM, num_pages
from latentd_kernels.reference.limits import within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd.changes import Moves
    from latentd.limits import Limits
    from latentd.operations import SamplingParams
    from latentd.scoring import ScorePlan

FAKE_INFO = ModelInfo(
    name="fake",
    fingerprint="0" * 64,
    vocab_size=256,
    eos_token_ids=(0,),
    layers=2,
    heads=4,
    nope_dim=128,
    v_dim=128,
    max_ctx=4096,
    max_slots=8,
    buckets=(1, 2, 4, 8),
    page_size=PAGE_SIZE,
    numerics="f32",
    dtype="bfloat16",
    device="fake",
)


def next_token(tokens: Sequence[int], vocab_size: int, seed: int = 0) -> int:
    """The token that the fake model samples after `tokens`; greedy sampling has seed 0."""
    data = np.asarray(tokens, np.int64).tobytes() + seed.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % vocab_size


def fake_logits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """float32 logits whose maximum is the greedy next token."""
    logits = np.linspace(-1.0, 0.0, vocab_size, dtype=np.float32)
    logits[next_token(tokens, vocab_size)] = 1.0
    return logits


def latent_id(latent: np.ndarray) -> int:
    """What the fake keeps of a row's latent."""
    return zlib.crc32(np.ascontiguousarray(latent).tobytes())


def fake_attention(
    q: np.ndarray, held: Sequence[int] | np.ndarray, layer: int, info: ModelInfo
) -> np.ndarray:
    """The attention of q over rows whose latents have these ids, [heads, v]."""
    data = np.ascontiguousarray(q).tobytes() + np.asarray(held, np.int64).tobytes() + bytes([layer])
    return np.full((info.heads, info.v_dim), zlib.crc32(data) % 0x4000, np.uint16)


class FakeBackend:
    """Keeps token ids where a real backend keeps latents."""

    def __init__(self, info: ModelInfo, pages: int) -> None:
        self.eager = True
        self.graph_replays = self.graph_fallbacks = 0
        self.on_long_wait: Callable[[], None] = lambda: None
        self.info = info
        self.most_updates = self.most_zero_pages = 0  # ever asked for in one plan
        self.fault: str | None = None  # set it, and the next wait() raises DeviceFault
        self.launches = 0
        self.copies = 0  # of pages
        self.is_fast = False  # set it, and what is launched is done when somebody looks
        self._clock_ns = 0
        self._page_rows = info.layers * PAGE_SIZE
        self._table = np.full((info.max_slots, num_pages(info.max_ctx)), -1, np.int32)
        self._memory = np.full(pages * self._page_rows, -1, np.int64)  # token id by kv_row
        self._limits: dict[int, Limits | None] = {}
        self._last = [-1] * info.max_slots  # what each slot sampled last
        self._pending: deque[tuple[StepPlan, frozenset[int]]] = deque()  # and their slots' pages
        self._writes: deque[list[tuple[Sequence[int], np.ndarray]]] = deque()  # behind each of them

    def launch(self, plan: StepPlan, bucket: int) -> None:
        assert len(self._pending) < 2
        assert plan.rows <= bucket
        copies = plan.changes.moves.copies if plan.changes.moves is not None else []
        new_pages = {*plan.changes.zero_pages, *(target for _, target in copies)}
        for _, pages in self._pending:  # they may be written until that launch has completed
            assert pages.isdisjoint(new_pages), "a page was handed out too early"
        self.launches += 1
        self.most_updates = max(self.most_updates, len(plan.changes.updates))
        self.most_zero_pages = max(self.most_zero_pages, len(plan.changes.zero_pages))
        owned = frozenset(page for task in plan.tasks for page in task.slot.pages)
        self._pending.append((plan, owned))
        self._writes.append([])

    def move(self, moves: Moves) -> None:
        assert not self._pending
        self._move(moves)

    def _move(self, moves: Moves) -> None:
        memory = self._memory.reshape(-1, self._page_rows)
        for source, target in moves.copies:
            memory[target] = memory[source]
            self.copies += 1
        for slot_id, first, pages in moves.rows:
            self._table[slot_id, first : first + len(pages)] = pages

    def read_pages(self, pages: Sequence[int]) -> np.ndarray:
        """The token id of a row is at the beginning of its bytes; the others are 7."""
        assert not self._pending
        rows = np.full((len(pages), self._page_rows, ROW_DIM * 2), 7, np.uint8)
        ids = self._memory.reshape(-1, self._page_rows)[list(pages)]
        rows[..., :8] = ids[..., None].view(np.uint8)
        return rows.reshape(len(pages), -1)

    def write_pages(self, pages: Sequence[int], data: np.ndarray) -> None:
        for _, owned in self._pending:
            assert owned.isdisjoint(pages), "a page in flight was written"
        if self._writes:
            self._writes[-1].append((pages, data.copy()))
        else:
            self._write(pages, data)

    def _write(self, pages: Sequence[int], data: np.ndarray) -> None:
        rows = np.ascontiguousarray(data.reshape(len(pages), self._page_rows, -1)[..., :8])
        self._memory.reshape(-1, self._page_rows)[list(pages)] = rows.view(np.int64)[..., 0]

    def is_done(self) -> bool:
        return self.is_fast and bool(self._pending)

    def wait(self) -> StepOutputs:
        if self.fault is not None:
            raise DeviceFault(self.fault)
        plan, _ = self._pending.popleft()
        self._prepare(plan)
        self._limits |= plan.changes.limits
        outputs = StepOutputs([], [], {}, self._clock_ns, self._clock_ns + 10_000)
        self._clock_ns += 11_000
        if plan.attends:
            outputs.attended = self._attend(plan)
            for pages, data in self._writes.popleft():
                self._write(pages, data)
            return outputs
        slots = [plan.slot_idx] * plan.rows if isinstance(plan.slot_idx, int) else plan.slot_idx
        self._memory[np.asarray(plan.kv_row)] = [
            self._last[slot] if token < 0 else token
            for slot, token in zip(slots, plan.token_ids, strict=True)
        ]
        for row in [plan.rows - 1] * plan.is_last if plan.is_chunk else range(plan.rows):
            sampling = plan.sampling[0 if plan.is_chunk else row]
            tokens = self._tokens(slots[row], int(plan.context_len[row]))
            seed = sampling.seed if sampling.temperature > 0 else 0
            outputs.tokens.append(self._choose(slots[row], tokens, seed or 0))
            self._last[slots[row]] = outputs.tokens[-1]
            outputs.logprobs.append(-float(outputs.tokens[-1]) / self.info.vocab_size)
            out_row = len(outputs.tokens) - 1
            if out_row in plan.logit_rows:
                outputs.logits[out_row] = self._logits(slots[row], tokens)
        if plan.scores is not None:
            outputs.scores = self._scores(plan, plan.scores)
        if plan.prompt_scores is not None:
            outputs.prompt_scores = self._scores(plan, plan.prompt_scores)
        for pages, data in self._writes.popleft():
            self._write(pages, data)
        return outputs

    def _attend(self, plan: StepPlan) -> np.ndarray:
        """`fake_attention` of each row, over what its layer's rows hold."""
        info, outputs = self.info, []
        requests = [task.request for task in plan.attends]
        q = np.concatenate([request.q for request in requests])
        ids = [latent_id(latent) for request in requests for latent in request.latent]
        for place, held in zip(plan.kv_row, ids, strict=True):
            if place >= 0:
                self._memory[place] = held
        assert not isinstance(plan.slot_idx, int)
        for row, slot in enumerate(plan.slot_idx):
            layer, pos = int(plan.token_ids[row]), np.arange(plan.context_len[row])
            pages = self._table[slot, pos // PAGE_SIZE].astype(np.int64)
            assert (pages >= 0).all(), f"slot {slot} has a hole"
            held = self._memory[pages * self._page_rows + layer * PAGE_SIZE + pos % PAGE_SIZE]
            outputs.append(fake_attention(q[row], held, layer, info).reshape(-1))
        return np.stack(outputs)

    def _prepare(self, plan: StepPlan) -> None:
        memory = self._memory.reshape(-1, self._page_rows)
        if plan.changes.moves is not None:
            self._move(plan.changes.moves)
        for slot_id, first, count, page in plan.changes.updates:
            self._table[slot_id, first : first + count] = page
        memory[plan.changes.zero_pages] = -1

    def _choose(self, slot_id: int, tokens: list[int], seed: int) -> int:
        """`next_token`, or within limits the likeliest one."""
        if self._limits.get(slot_id) is None:
            return next_token(tokens, self.info.vocab_size, seed)
        return int(self._logits(slot_id, tokens).argmax())

    def _logits(self, slot_id: int, tokens: list[int]) -> np.ndarray:
        logits, limits = fake_logits(tokens, self.info.vocab_size), self._limits.get(slot_id)
        return logits if limits is None else within(logits, seat_limits(limits))

    def _scores(self, plan: StepPlan, asked: ScorePlan) -> Scores:
        """The likeliest tokens are those of `fake_logits`, whose values pass for logarithms."""
        vocab, rows = self.info.vocab_size, range(asked.first, asked.first + asked.rows)
        slots = [plan.slot_idx] * plan.rows if isinstance(plan.slot_idx, int) else plan.slot_idx
        logits = np.stack(
            [fake_logits(self._tokens(slots[r], int(plan.context_len[r])), vocab) for r in rows]
        )
        top = np.argsort(-logits, axis=1, kind="stable")[:, : asked.top].astype(np.int32)
        targets = [0] * asked.rows if asked.targets is None else asked.targets
        each = np.arange(asked.rows)
        return Scores(top, logits[each[:, None], top], logits[each, targets])

    def _tokens(self, slot_id: int, length: int) -> list[int]:
        pos = np.arange(length)
        pages = self._table[slot_id, pos // PAGE_SIZE].astype(np.int64)
        assert (pages >= 0).all(), f"slot {slot_id} has a hole"
        tokens = self._memory[pages * self._page_rows + pos % PAGE_SIZE]
        assert (tokens >= 0).all(), f"slot {slot_id} reads rows that nothing wrote"
        return [int(token) for token in tokens]


class FakeEngine(Engine):
    """`Engine` over FakeBackend; `pages` defaults to full coverage."""

    def __init__(
        self, info: ModelInfo = FAKE_INFO, pages: int | None = None, prefill_chunk: int = 128,
        prefill_rows: int = 0, cache: bool = False, **changes: object,
    ) -> None:  # fmt: skip
        """`changes` replace fields of `info`, for example max_ctx=100."""
        info = replace(info, **changes)  # type: ignore[arg-type]
        pages = info.max_slots * num_pages(info.max_ctx) if pages is None else pages
        self.fake = FakeBackend(info, pages)
        slots = SlotTable(info.max_slots, info.max_ctx, PagePool(pages))
        super().__init__(info, slots, self.fake, prefill_chunk, prefill_rows)
        if cache:
            self.cache_prefixes()

    def expected_token(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> int:
        """What sampling after `tokens` yields."""
        seed = sampling.seed if sampling is not None and sampling.temperature > 0 else 0
        return next_token(tokens, self.info.vocab_size, seed or 0)
