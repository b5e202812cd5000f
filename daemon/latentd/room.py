"""Room in the pool: what is free beside the pages promised to prompts that wait for their turn.

Who came first goes first: a prompt takes its pages chunk by chunk, and nobody who came after it may
take those that it still needs.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from latentd_client.errors import RequestRejected
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections import deque

    from latentd.plans import OpenTask
    from latentd.slots import SlotTable


class RoomLeft(NamedTuple):
    """What a newcomer can have: seats, and pages that are promised to nobody."""

    slots: int
    pages: int


class Room:
    """The pool of one slot table and the queue of prompts, `opens`."""

    def __init__(self, slots: SlotTable, opens: deque[OpenTask]) -> None:
        self._slots = slots
        self._pool = slots.pool
        self._opens = opens
        self.turns = count()
        """The numbers of prompts and streams, in the order of their admission."""

    @property
    def left(self) -> RoomLeft:
        """What is there for who comes now."""
        return RoomLeft(len(self._slots.free_seats), max(0, self._free() - self._promised()))

    def check_size(self, what: str, pages: int) -> None:
        """Raise RequestRejected("too_large") for what would not fit into an empty pool either."""
        total = self._pool.num_pages
        if pages > total:
            text = f"{what} needs {pages} pages, the pool has {total} in all: it can never fit"
            raise RequestRejected("too_large", text, pages_needed=pages, pages_total=total)

    def check(self, what: str, pages: int) -> None:
        """Raise RequestRejected("no_pages") for what does not fit beside what is promised."""
        free, promised = self._free(), self._promised()
        if pages > free - promised:
            total = self._pool.num_pages
            raise RequestRejected(
                "no_pages",
                f"{what} needs {pages} pages; {free} of {total} are free and {promised} of them "
                "promised to prompts before it",
                pages_needed=pages, pages_free=max(0, free - promised), pages_total=total,
            )  # fmt: skip

    def has_page(self, turn: int) -> bool:
        """Whether a stream of that turn may take a page more."""
        return self._pool.num_free > self._promised(turn)

    def _free(self) -> int:
        """Pages that will be there when a newcomer's turn comes."""
        return self._pool.num_free + self._pool.num_waiting

    def _promised(self, turn: int | None = None) -> int:
        """Pages that the prompts in the queue still need, or those of them before a turn."""
        return sum(
            num_pages(len(task.prompt)) - len(task.slot.pages)
            for task in self._opens
            if turn is None or task.turn < turn
        )
