"""Whose turn it is in the waiting room, with hands on its clock and its pool."""

from __future__ import annotations

from typing import Any

import pytest

from latentd import waiting
from latentd.room import RoomLeft
from latentd.waiting import HOLD_S, MAX_PASSED, Place, WaitingRoom
from latentd_client.errors import RequestRejected


class Pool:
    """Pages and seats that those who are let in take."""

    def __init__(self, pages: int, slots: int = 1000) -> None:
        self.pages, self.slots = pages, slots
        self.begun: list[str] = []

    def room(self) -> RoomLeft:
        return RoomLeft(self.slots, self.pages)

    def place(self, name: str, pages: int, is_new: bool = True, **fields: Any) -> Place:
        """One that wants so many pages, and found none of them."""

        def start() -> Any:
            if pages > self.pages:
                raise lack(pages)
            if is_new and not self.slots:
                raise RequestRejected("no_slot", "full")
            self.pages -= pages
            self.slots -= is_new
            self.begun.append(name)
            return name

        run: Any = name
        return Place(run, start, lack(pages), is_new, **fields)


def lack(pages: int) -> RequestRejected:
    return RequestRejected("no_pages", "full", pages_needed=pages)


def names(room: WaitingRoom) -> list[str]:
    """Who waits, in their order."""
    return [str(run) for run in room]


def let_in(room: WaitingRoom, pool: Pool, now: float = 0.0) -> list[str]:
    """Who begins now."""
    before = len(pool.begun)
    for _ in room.retry(pool.room, now):
        pass
    return pool.begun[before:]


def test_the_oldest_goes_first_and_nobody_goes_without_room() -> None:
    room, pool = WaitingRoom(9), Pool(0)
    for name in "abc":
        room.enter(pool.place(name, 2))
    assert let_in(room, pool) == []
    pool.pages = 5
    assert let_in(room, pool) == ["a", "b"]
    assert (room.count, room.admitted, names(room)) == (1, 2, ["c"])


def test_open_slots_go_before_new_ones_however_late_they_come() -> None:
    room, pool = WaitingRoom(9), Pool(0)
    room.enter(pool.place("new", 1))
    room.enter(pool.place("old", 1, is_new=False))
    pool.pages = 1
    assert let_in(room, pool) == ["old"]


def test_who_has_run_already_stands_before_those_who_have_not() -> None:
    room, pool = WaitingRoom(9), Pool(0)
    room.enter(pool.place("fresh", 1))
    room.enter(pool.place("first to run", 1, has_run=True))
    room.enter(pool.place("second to run", 1, has_run=True))
    pool.pages = 3
    assert let_in(room, pool) == ["first to run", "second to run", "fresh"]


def test_what_fits_passes_what_does_not() -> None:
    room, pool = WaitingRoom(9), Pool(0)
    room.enter(pool.place("large", 9))
    room.enter(pool.place("small", 1))
    pool.pages = 2
    assert let_in(room, pool) == ["small"]


def pass_it(room: WaitingRoom, pool: Pool, count: int, now: float) -> int:
    """Small requests come one by one, and take a page each if they are let in."""
    passed = 0
    for number in range(count):
        room.enter(pool.place(f"{now} {number}", 1))
        pool.pages += 1
        passed += bool(let_in(room, pool, now))
        pool.pages = 0
    return passed


def test_a_large_prompt_is_passed_so_often_and_then_all_wait_for_it() -> None:
    room, pool = WaitingRoom(1000), Pool(0)
    room.enter(pool.place("large", 9))
    assert pass_it(room, pool, MAX_PASSED + 20, now=0.0) == MAX_PASSED
    for pages in range(9):  # they gather for it
        pool.pages = pages
        assert let_in(room, pool, now=1.0) == []
    pool.pages = 9
    assert let_in(room, pool, now=1.0)[0] == "large"


def test_nobody_waits_for_ever_behind_what_cannot_fit() -> None:
    room, pool = WaitingRoom(1000), Pool(0)
    room.enter(pool.place("large", 9))
    now, passed = 0.0, 0
    for held_s in (HOLD_S, 2 * HOLD_S, 4 * HOLD_S):  # it waits longer each time
        assert pass_it(room, pool, MAX_PASSED - passed, now) == MAX_PASSED - passed
        assert pass_it(room, pool, 1, now) == 0
        assert pass_it(room, pool, 1, now + held_s - 0.1) == 0
        now += held_s + 0.1
        pool.pages = 2
        passed = len(let_in(room, pool, now))
        assert passed == 2, "those that were held"


def test_the_next_large_prompt_has_been_passed_by_nobody() -> None:
    room, pool = WaitingRoom(1000), Pool(0)
    room.enter(pool.place("large", 9))
    room.enter(pool.place("next", 8))
    assert pass_it(room, pool, MAX_PASSED + 1, now=0.0) == MAX_PASSED
    room.leave(next(iter(room)))
    pool.pages = 1
    assert len(let_in(room, pool)) == 1, "the one that was held"
    assert pass_it(room, pool, 5, now=0.0) == 5


def test_who_lacks_a_seat_waits_for_a_seat() -> None:
    room, pool = WaitingRoom(9), Pool(9, slots=0)
    room.enter(pool.place("new", 1))
    room.enter(pool.place("old", 1, is_new=False))
    assert let_in(room, pool) == ["old"]
    pool.slots = 1
    assert let_in(room, pool) == ["new"]


def test_a_refusal_that_room_does_not_mend_ends_the_wait() -> None:
    room, pool = WaitingRoom(9), Pool(0)

    def start() -> Any:
        raise RequestRejected("epoch_gone", "closed")

    run: Any = "gone"
    room.enter(Place(run, start, lack(1)))
    pool.pages = 1
    ((told, outcome),) = room.retry(pool.room, 0.0)
    assert (str(told), room.count) == ("gone", 0)
    assert isinstance(outcome, RequestRejected)
    assert outcome.code == "epoch_gone"


def test_a_full_waiting_room_refuses_new_slots_and_keeps_open_ones() -> None:
    room, pool = WaitingRoom(2), Pool(0)
    room.enter(pool.place("a", 1))
    room.enter(pool.place("b", 1))
    with pytest.raises(RequestRejected, match="full"):
        room.enter(pool.place("c", 1))
    room.enter(pool.place("old", 1, is_new=False))
    assert names(room) == ["old", "a", "b"]


def test_prompts_that_wait_keep_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_BYTES", 100)
    room, pool = WaitingRoom(9), Pool(0)
    room.enter(pool.place("a", 1, size=60))
    with pytest.raises(RequestRejected):
        room.enter(pool.place("b", 1, size=60))
    run: Any = "a"
    assert room.leave(run)
    room.enter(pool.place("b", 1, size=60))


def test_nobody_waits_where_none_may() -> None:
    with pytest.raises(RequestRejected):
        WaitingRoom(0).enter(Pool(0).place("a", 1, is_new=False))
