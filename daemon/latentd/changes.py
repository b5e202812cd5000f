"""Changes of what the device keeps by slot, which wait for the next launch: mapped and unmapped
pages, copies of pages, the limits of samplers. Only what has changed travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd.limits import Limits
    from latentd.slots import Slot

Update: TypeAlias = tuple[int, int, int, int]
"""(slot, first_idx, count, page_id): entries first_idx .. first_idx + count - 1 := page_id."""


class Moves(NamedTuple):
    """What the device does before the updates of the same step: `copies` of whole pages (source,
    target), and `rows`, runs of the block table (slot, first_idx, page ids). Both in order."""

    copies: list[tuple[int, int]]
    rows: list[tuple[int, int, NDArray[np.int32]]]


class Changes(NamedTuple):
    """What a launch changes before anything reads it: first `moves`, which map pages that others
    have filled, then `updates`, of which at most one a slot unmaps and the others map one page
    each; `zero_pages` are the newly mapped ones, `limits` those of slots that have others now."""

    updates: list[Update]
    zero_pages: list[int]
    moves: Moves | None = None
    limits: list[tuple[int, Limits | None]] = []  # noqa: RUF012 (never written)


NO_CHANGES: Final = Changes([], [])
"""Nothing to be changed; never written."""


class PendingChanges:
    """Collects changes until a launch takes them."""

    def __init__(self) -> None:
        self._slots: dict[Slot, None] = {}  # whose device row is out of date, in order
        self._limits: dict[int, Limits | None] = {}
        self._moves = Moves([], [])

    def note(self, slot: Slot) -> None:
        """Pages of a slot have come or gone."""
        self._slots[slot] = None

    def limit(self, slot: Slot) -> None:
        """A slot has other limits now."""
        self._limits[slot.slot_id] = slot.limits

    def move(self, slot: Slot, first: int, pages: NDArray[np.int32], copied_from: int) -> None:
        """Filled pages were appended to a slot, from entry `first` on; the last of them is a copy
        of another one, if that is not -1."""
        self._moves.rows.append((slot.slot_id, first, pages))
        if copied_from >= 0:
            self._moves.copies.append((copied_from, int(pages[-1])))

    @property
    def num_moves(self) -> int:
        """How many runs of the block table take_moves() would have."""
        return len(self._moves.rows)

    def take(self) -> Changes:
        """All changes since the last call, mostly none; they must go with the next launch."""
        if not (self._slots or self._limits or self._moves.rows):
            return NO_CHANGES
        updates, zero_pages = self._take_updates()
        limits, self._limits = list(self._limits.items()), {}
        return Changes(updates, zero_pages, self.take_moves(), limits)

    def take_moves(self) -> Moves | None:
        """The moves alone, mostly None."""
        moves = self._moves
        if not moves.rows:
            return None
        self._moves = Moves([], [])
        return moves

    def _take_updates(self) -> tuple[list[Update], list[int]]:
        updates: list[Update] = []
        zero: list[int] = []
        for slot in self._slots:
            have = len(slot.pages)
            for idx in range(slot.synced, have):
                updates.append((slot.slot_id, idx, 1, slot.pages[idx]))
                zero.append(slot.pages[idx])
            if slot.mapped > have:
                updates.append((slot.slot_id, have, slot.mapped - have, -1))
            slot.synced = slot.mapped = have
        self._slots.clear()
        return updates, zero
