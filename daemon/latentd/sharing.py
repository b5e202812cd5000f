"""Pages that several slots own, or that the prefix cache may give to others: fork, and the copy
before somebody writes into such a page.

A full page is never written again, so any number of slots may read it. What a slot appends to is
its own page alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from latentd.operations import SamplingParams
    from latentd.plans import OpenTask
    from latentd.prefix_cache import PrefixCache
    from latentd.slots import Slot, SlotTable


class Sharing:
    """Shares pages between the slots of one table."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self.pool = slots.pool
        self.cache: PrefixCache | None = None

    def fork(self, source: Slot, sampling: SamplingParams) -> Slot:
        """Seat a sequence with the tokens of an idle one. Full pages get one owner more, the last,
        partly filled one is copied. Raises RequestRejected("no_slot", "no_pages") and changes
        nothing."""
        full, rest = divmod(source.length, PAGE_SIZE)
        slot = self.slots.take(sampling)
        try:
            copy = self.pool.claim(1) if rest else []
        except RequestRejected:
            self.slots.free(slot)
            raise
        shared = source.pages[:full]
        self.pool.share(shared)
        self.slots.append_filled(slot, shared + copy, source.pages[full] if copy else -1)
        slot.length, slot.token = source.length, source.token
        slot.tokens[: slot.length] = source.tokens[: slot.length]
        slot.chain = source.chain[:]
        return slot

    def begin(self, task: OpenTask, salt: str) -> None:
        """Put a new slot on the pages that hold the beginning of its prompt."""
        if self.cache is not None:
            self.cache.begin(task.slot, salt)
            self.reuse(task)

    def reuse(self, task: OpenTask) -> None:
        """Go on over pages that hold what comes next in a prompt, if there are any (by now). A
        prompt whose tokens are scored is computed."""
        if self.cache is not None and task.prompt_scores is None:
            task.request.cached_tokens += self.cache.reuse(task.slot, task.prompt)

    def own(self, slot: Slot) -> None:
        """Make the page that a truncated slot will append to its own, by a copy if need be. Raises
        RequestRejected("no_pages") and changes nothing."""
        full, rest = divmod(slot.length, PAGE_SIZE)
        assert len(slot.pages) == full + (rest > 0), "a borrowed page is the last one"
        if rest and not self._is_only_mine(slot.pages[full]):
            copy = self.pool.claim(1)
            source = slot.pages.pop()
            slot.synced = full
            self.pool.release([source])
            self.slots.append_filled(slot, copy, source)
        slot.borrowed = False

    def _is_only_mine(self, page: int) -> bool:
        """Whether the owner of a page may write to it. When no page is left for a copy, the cache
        gives it up."""
        if self.pool.owners(page) > 1:
            return False
        if not self.pool.is_kept(page):
            return True
        if self.pool.num_free or self.pool.num_waiting or self.cache is None:
            return False
        self.cache.forget(page)
        return True
