"""The page pool: which pages of the slab are free and how many owners each used page has.

A page that is released while launches are in flight is free once they have completed: until then
one of them may still write it. Plain integers; it knows nothing of slots, tokens or the memory
behind a page id.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 0 .. num_pages - 1. The page released last is handed out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is the next
        self._owners = [0] * num_pages
        self._waiting: deque[tuple[int, int]] = deque()  # released: the last launch then, the page
        self._launched = self._done = 0

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - len(self._free) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Pages without an owner that wait for launches in flight."""
        return len(self._waiting)

    def note_launch(self) -> None:
        """A step was launched; steps complete in the order of their launches."""
        self._launched += 1

    def note_done(self) -> None:
        """The oldest step in flight has completed: pages that waited for it are free."""
        self._done += 1
        while self._waiting and self._waiting[0][0] <= self._done:
            self._free.append(self._waiting.popleft()[1])

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
        if count > len(self._free):
            raise RequestRejected(
                "no_pages",
                f"{count} more pages are needed and {len(self._free)} of {self.num_pages} are "
                "free; close or truncate a slot",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a used page."""
        assert self._owners[page] > 0, f"page {page} is free"
        self._owners[page] += 1

    def owners(self, page: int) -> int:
        """How many owners a page has; 0 when it is free."""
        return self._owners[page]

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page; a page without owners is free again, once the launches
        that are in flight have completed."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is released twice"
            self._owners[page] -= 1
            if self._owners[page] > 0:
                continue
            if self._launched > self._done:
                self._waiting.append((self._launched, page))
            else:
                self._free.append(page)

    def check(self) -> None:
        """Raise AssertionError unless free and used pages make up all, none of them twice."""
        unowned = [*self._free, *(page for _, page in self._waiting)]
        free = set(unowned)
        assert len(free) == len(unowned), "a page is free twice"
        for page, owners in enumerate(self._owners):
            assert owners >= 0, f"page {page} has {owners} owners"
            assert (page in free) == (owners == 0), f"page {page} is both free and owned, or lost"
