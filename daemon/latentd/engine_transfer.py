"""Export and adopt: pages of idle slots leave as bytes, and sequences arrive page by page.

What is on its way in has a seat and its pages, but nobody knows its epoch and its length is 0: it
is no slot before its commit. Nothing is launched for it; its bytes go to the device between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd.token_checks import bad_token, prompt_ids
from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM, num_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from latentd.engine_admission import Admission
    from latentd.operations import ModelInfo, SamplingParams
    from latentd.plans import Backend
    from latentd.sharing import Sharing
    from latentd.slots import Slot, SlotTable

MAX_MOVES: Final = 64
"""Moves that may wait for the next step."""


@dataclass(frozen=True)
class PageGeometry:
    """The shape of a page's bytes: `layers` runs of `page_size` rows of `row_dim` numbers."""

    layers: int
    page_size: int
    row_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.row_dim * (2 if self.dtype == "bfloat16" else 4)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * self.page_size * self.row_bytes


@dataclass(eq=False, slots=True)
class Arrival:
    """A sequence on its way in: what its slot will be, and which of its pages are there."""

    slot: Slot
    tokens: NDArray[np.int32]
    token: int | None
    salt: str
    missing: set[int] = field(default_factory=set)


class Transfers:
    """Moves pages between slots and the outside; a refusal is a RequestRejected and changes
    nothing."""

    def __init__(
        self, info: ModelInfo, slots: SlotTable, sharing: Sharing, admission: Admission,
        backend: Backend, settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """`settle` waits until nothing is in flight."""
        self.geometry = PageGeometry(info.layers, info.page_size, ROW_DIM, info.dtype)
        self.vocab_size = info.vocab_size
        self.slots = slots
        self.sharing = sharing
        self.admission = admission
        self.backend = backend
        self._settle = settle
        self.pages_exported = 0
        self.slots_adopted = 0

    def relieve(self) -> None:
        """Have the moves done that have piled up: slots on filled pages may come and go for long
        before anybody takes a step, and that step must not wait for all their copies."""
        if self.slots.changes.num_moves >= MAX_MOVES:
            self.move()

    def look(self, slot_id: int, epoch: int, pos: int) -> Slot:
        """A slot that may be exported: nothing runs on it, and it has `pos` tokens."""
        return self.admission.idle_slot(slot_id, epoch, pos)

    def read(self, slot: Slot, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of `count` pages of an idle slot, [count, page_bytes]; what lies behind its
        last token is zero. Waits for the device."""
        have = num_pages(slot.length)
        if first + count > have:
            text = f"pages {first} to {first + count - 1} of a slot that has {have}"
            raise RequestRejected("invalid", text)
        if not count:
            return np.empty((0, self.geometry.page_bytes), np.uint8)
        self._settle()
        self.move()
        data = self.backend.read_pages(slot.pages[first : first + count])
        self.pages_exported += count
        return self._zero_tail(data, first, slot.length)

    def begin(
        self, tokens: NDArray[np.int32] | list[int], token: int | None, sampling: SamplingParams,
        salt: str,
    ) -> Arrival:  # fmt: skip
        """Take a seat and all pages for a sequence. Draws the seed if there is none."""
        self.relieve()
        ids = self.check(tokens, token, sampling)
        sampling = sampling.seeded()
        count = num_pages(len(ids))
        self.admission.room.check("the sequence", count)
        slot = self.slots.take(sampling)
        try:
            pages = self.admission.patiently(lambda: self.slots.pool.claim(count))
        except RequestRejected:
            self.slots.free(slot)
            raise
        self.slots.append_filled(slot, pages)
        slot.task = arrival = Arrival(slot, ids, token, salt, set(range(count)))
        return arrival

    def check(
        self, tokens: NDArray[np.int32] | list[int], token: int | None, sampling: SamplingParams
    ) -> NDArray[np.int32]:
        """The ids of a sequence that could begin if there were room. Raises RequestRejected."""
        ids = prompt_ids(tokens, self.vocab_size, "sequence")
        if token is not None and not 0 <= token < self.vocab_size:
            raise bad_token("token", token, self.vocab_size)
        sampling.validate()
        max_ctx = self.slots.max_ctx
        if len(ids) > max_ctx:
            raise RequestRejected(
                "context_full", f"the sequence has {len(ids)} tokens; max_ctx is {max_ctx}",
                max_ctx=max_ctx,
            )  # fmt: skip
        self.admission.room.check_size("the sequence", num_pages(len(ids)))
        return ids

    def put(self, arrival: Arrival, first: int, data: NDArray[np.uint8]) -> None:
        """Fill pages from `first` on with `data` [count, page_bytes], which fits in."""
        self.move()  # nothing that others still want copied lands in these pages afterwards
        data = self._zero_tail(data, first, len(arrival.tokens))
        self.backend.write_pages(arrival.slot.pages[first : first + len(data)], data)
        arrival.missing.difference_update(range(first, first + len(data)))

    def commit(self, arrival: Arrival) -> Slot:
        """Make a slot of it; all its pages are there. With a salt, prompts of the same salt may
        begin on its full pages."""
        assert not arrival.missing, "a page is missing"
        slot, length = arrival.slot, len(arrival.tokens)
        slot.tokens[:length] = arrival.tokens.data
        slot.length, slot.token, slot.task = length, arrival.token, None
        if arrival.salt and self.sharing.cache is not None:
            self.sharing.cache.begin(slot, arrival.salt)
            self.slots.full.append(slot)
        self.slots_adopted += 1
        return slot

    def drop(self, arrival: Arrival) -> None:
        """Give the seat and the pages of an unfinished one back."""
        self.slots.free(arrival.slot)

    def move(self) -> None:
        """Have the moves done that wait for the next step."""
        if self.slots.changes.num_moves:
            self._settle()
            moves = self.slots.changes.take_moves()
            assert moves is not None
            self.backend.move(moves)

    def _zero_tail(self, data: NDArray[np.uint8], first: int, length: int) -> NDArray[np.uint8]:
        """Pages with zero rows behind the last token, if its page is one of them: it ends them."""
        rest = length - (first + len(data) - 1) * PAGE_SIZE
        if rest >= PAGE_SIZE:
            return data
        if not data.flags.writeable:
            data = data.copy()
        geometry = self.geometry
        rows = data[-1].reshape(geometry.layers, geometry.page_size, geometry.row_bytes)
        rows[:, rest:] = 0
        return data
