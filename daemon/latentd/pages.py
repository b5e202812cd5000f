"""The page pool: which pages of the slab are free and how many owners each used page has.

A page that is released while launches are in flight is free once they have completed: until then
one of them may still write it. A page may be kept: what is in it may be wanted again. Without an
owner it is then idle instead of free, and is handed out last, the one released first before the
others. Plain integers; it knows nothing of slots, tokens or the memory behind a page id.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Pages 0 .. num_pages - 1. The page released last is handed out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is the next
        self._owners = [0] * num_pages
        self._waiting: dict[int, int] = {}  # released: the page, the last launch then
        self._launched = self._done = 0
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # the one released longest ago first
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with an idle page that is about to be handed out."""
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Pages that can be claimed: without an owner, and nothing in flight may write them."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Kept pages that can be claimed."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.num_free - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Pages without an owner that wait for launches in flight."""
        return len(self._waiting)

    def note_launch(self) -> None:
        """A step was launched; steps complete in the order of their launches."""
        self._launched += 1

    def note_done(self) -> None:
        """The oldest step in flight has completed: pages that waited for it can be claimed."""
        self._done += 1
        while self._waiting:
            page, launch = next(iter(self._waiting.items()))
            if launch > self._done:
                return
            del self._waiting[page]
            self._put_back(page)

    def reorder(self, order: Sequence[int]) -> None:
        """Hand out the free pages in this order. `order` must name each free page once.

        Results never depend on page ids; tests prove it with this.
        """
        if sorted(order) != sorted(self._free):
            raise ValueError(f"order must name each of the {len(self._free)} free pages once")
        self._free = list(reversed(order))

    def free_pages(self) -> list[int]:
        """The free pages in the order in which they will be handed out."""
        return self._free[::-1]

    def claim(self, count: int) -> list[int]:
        """Take `count` free pages, one owner each. Raises RequestRejected("no_pages") and takes
        none when fewer are free."""
        if count > self.num_free:
            raise RequestRejected(
                "no_pages",
                f"{count} more pages are needed and {self.num_free} of {self.num_pages} are free; "
                "close or truncate a slot",
                pages_needed=count, pages_free=self.num_free, pages_total=self.num_pages,
            )  # fmt: skip
        for page in list(islice(self._idle, max(0, count - len(self._free)))):
            self.on_evict(page)
            self.forget(page)
            self.num_evicted += 1
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page, which is used or kept."""
        owners, idle, waiting = self._owners, self._idle, self._waiting
        for page in pages:
            if not owners[page]:
                assert page in self._kept, f"page {page} is free"
                idle.pop(page, None)
                waiting.pop(page, None)
            owners[page] += 1

    def keep(self, page: int) -> None:
        """From now on a used page is idle instead of free when it has no owner."""
        assert self._owners[page] > 0, f"page {page} is free"
        self._kept.add(page)

    def is_kept(self, page: int) -> bool:
        """Whether a page is kept."""
        return page in self._kept

    def forget(self, page: int) -> None:
        """End a page's being kept; an idle one is free."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def owners(self, page: int) -> int:
        """How many owners a page has; 0 when it is free."""
        return self._owners[page]

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page; a page without owners can be claimed again, once the
        launches that are in flight have completed."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is released twice"
            self._owners[page] -= 1
            if self._owners[page] > 0:
                continue
            if self._launched > self._done:
                self._waiting[page] = self._launched
            else:
                self._put_back(page)

    def _put_back(self, page: int) -> None:
        if page in self._kept:
            self._idle[page] = None
        else:
            self._free.append(page)

    def check(self) -> None:
        """Raise AssertionError unless free, idle, waiting and used pages make up all, none of them
        twice."""
        unowned = [*self._free, *self._idle, *self._waiting]
        free = set(unowned)
        assert len(free) == len(unowned), "a page is free twice"
        assert self._kept.issuperset(self._idle), "a page is idle and not kept"
        assert self._kept.isdisjoint(self._free), "a page is kept and free"
        for page, owners in enumerate(self._owners):
            assert owners >= 0, f"page {page} has {owners} owners"
            assert (page in free) == (owners == 0), f"page {page} is both free and owned, or lost"
