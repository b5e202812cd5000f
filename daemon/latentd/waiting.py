"""The waiting room: whose turn it is when the pool was full and there is room again.

Two lines. What slots that are open need to go on comes first, the oldest of it first; whatever fits
passes what does not. New slots come behind that, in their order, so that decoding ends and gives
pages back. Of them too those that fit may pass the first one, but only MAX_PASSED of them: then all
wait for it, up to HOLD_S, and twice as long each time that it was in vain. So the first one does
not wait for ever while any finite work runs, and nobody waits for ever behind what cannot fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from latentd.operations import Request
    from latentd.room import RoomLeft
    from latentd.runs import Run
    from latentd_client.protocol import Header

    Outcome = Request | Header
    """What the engine runs, or the results of what was done at once."""

MAX_PASSED = 64
"""Requests for new slots that may pass the first one before all wait for it."""
HOLD_S = 5.0
"""How long they wait for it the first time."""
MAX_WAITING_BYTES = 64 << 20
"""Prompts in the waiting room."""


@dataclass(eq=False, slots=True)
class Place:
    """A run that waits. `start` admits it or raises like the engine; `refusal` says what was
    lacking last. `size` is what it keeps, in bytes; `has_run`: it stands before those that have
    not."""

    run: Run
    start: Callable[[], Outcome]
    refusal: RequestRejected
    is_new: bool = False
    size: int = 0
    has_run: bool = False

    def may_fit(self, room: RoomLeft) -> bool:
        """Whether there is as much as was lacking last."""
        if self.is_new and not room.slots:
            return False
        pages = self.refusal.detail.get("pages_needed")
        return not isinstance(pages, int) or pages <= room.pages


class WaitingRoom:
    """Places in their order. At most `most` of them are for new slots; with 0 nobody waits."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        """How many wait."""
        self.admitted = 0
        """How many have waited and were let in."""
        self._old: dict[Run, Place] = {}
        self._new: dict[Run, Place] = {}
        self._size = 0
        self._seen: RoomLeft | None = None  # nobody has fitted into that
        self._first: Place | None = None  # the one that `_passed` others have passed
        self._passed = 0
        self._hold_s = HOLD_S
        self._held_until = math.inf

    def __contains__(self, run: object) -> bool:
        return run in self._old or run in self._new

    def __iter__(self) -> Iterator[Run]:
        return iter([*self._old, *self._new])

    @property
    def num_old(self) -> int:
        """How many open slots wait."""
        return len(self._old)

    @property
    def newest_old(self) -> Place:
        """The one of them that came last."""
        return next(reversed(self._old.values()))

    @property
    def has_new(self) -> bool:
        """Whether somebody waits for a new slot."""
        return bool(self._new)

    def takes(self, refusal: RequestRejected) -> bool:
        """Whether what was refused may wait."""
        return self.most > 0 and refusal.code in ("no_pages", "no_slot")

    def enter(self, place: Place) -> None:
        """Wait. Raises the refusal where there is no place."""
        line = self._new if place.is_new else self._old
        is_full = len(self._new) >= self.most or self._size + place.size > MAX_WAITING_BYTES
        if not self.takes(place.refusal) or (place.is_new and is_full):
            raise place.refusal
        if place.has_run:
            ran = {run: other for run, other in line.items() if other.has_run}
            line = {**ran, place.run: place, **line}
        else:
            line[place.run] = place
        self._old, self._new = (self._old, line) if place.is_new else (line, self._new)
        self.count += 1
        self._size += place.size
        self._seen = None

    def leave(self, run: Run) -> bool:
        """Wait no more; whether it did."""
        place = self._old.pop(run, None) or self._new.pop(run, None)
        if place is None:
            return False
        self.count -= 1
        self._size -= place.size
        self._seen = None
        return True

    def check_turn(self) -> None:
        """Raise RequestRejected for a newcomer that wants a slot, if others wait for theirs."""
        if self._new:
            first = next(iter(self._new.values())).refusal
            text = f"{len(self._new)} requests wait for room before it; retry later"
            raise RequestRejected(first.code, text)

    def look_again(self) -> None:
        """Have the next retry look at everybody, and at the first one whatever it lacked."""
        self._seen = None
        for place in self._new.values():
            place.refusal = RequestRejected(place.refusal.code, str(place.refusal))
            break

    def retry(
        self, room: Callable[[], RoomLeft], now: float
    ) -> Iterator[tuple[Run, Outcome | RequestRejected]]:
        """Start those that have room now, in their order; each with what came of it, or a refusal
        that no room would have spared it."""
        left, seen = room(), self._seen
        if seen is not None and left.pages <= seen.pages and left.slots <= seen.slots:
            return
        for place in [*self._old.values()]:
            if (outcome := self._try(place, room())) is not None:
                yield place.run, outcome
        for place in [*self._new.values()]:
            is_first = self._is_first(place)
            if not is_first and self._is_held(now):
                break
            if (outcome := self._try(place, room())) is not None:
                self._passed += not is_first
                yield place.run, outcome
        self._seen = room()

    def _try(self, place: Place, room: RoomLeft) -> Outcome | RequestRejected | None:
        """Start one; None: it waits on."""
        if place.run not in self or not place.may_fit(room):
            return None
        outcome: Outcome | RequestRejected
        try:
            outcome = place.start()
        except RequestRejected as refusal:
            if self.takes(refusal):
                place.refusal = refusal
                return None
            outcome = refusal
        else:
            self.admitted += 1
        self.leave(place.run)
        return outcome

    def _is_first(self, place: Place) -> bool:
        """Whether it stands first in the line of new slots; a new first one has been passed by
        nobody."""
        if place is not next(iter(self._new.values()), None):
            return False
        if place is not self._first:
            self._first, self._passed = place, 0
            self._hold_s, self._held_until = HOLD_S, math.inf
        return True

    def _is_held(self, now: float) -> bool:
        """Whether all wait for the first one."""
        if self._passed < MAX_PASSED:
            return False
        if self._held_until == math.inf:
            self._held_until = now + self._hold_s
        if now < self._held_until:
            return True
        self._passed, self._held_until = 0, math.inf
        self._hold_s *= 2
        return False
