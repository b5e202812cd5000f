"""What the host does for a step, counted in calls of Python functions: unlike times they are the
same on every machine, and creep in one by one."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from fakes import FakeEngine
from latentd_client import Client
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STEPS = 40
OURS = ("/latentd/", "/latentd_client/")


class Counter:
    """Counts the calls of our functions on the threads that are started with it, and on this one
    while it is used as a context manager."""

    def __init__(self) -> None:
        self.calls = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and any(part in name for part in OURS):
            self.calls += 1

    def __enter__(self) -> Counter:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


@pytest.fixture
def counter() -> Counter:
    return Counter()


def fewest(counter: Counter, step: Callable[[], object]) -> int:
    """Calls of one step on both ends; fewest, as a loop that wakes up early goes round again."""
    counts = []
    for _ in range(STEPS):
        before = counter.calls
        step()
        counts.append(counter.calls - before)
    return min(counts)


def cost(endpoint: str, counter: Counter, rows: int) -> int:
    """The calls of a step of so many slots in one request."""
    engine = FakeEngine(max_slots=64, buckets=(1, 64))
    threading.setprofile(counter.note)
    try:
        with serving(endpoint, engine), Client(endpoint, spin_s=0.0) as client:
            slots = [client.open([1, 2, 3]) for _ in range(rows)]
            with counter:
                if rows == 1:
                    return fewest(counter, slots[0].step)
                return fewest(counter, lambda: client.step([(slot, None) for slot in slots]))
    finally:
        threading.setprofile(None)


def test_a_step_takes_few_calls_on_both_ends(endpoint: str, counter: Counter) -> None:
    assert cost(endpoint, counter, 1) <= 132


def test_a_further_slot_of_a_request_takes_few_calls_on_both_ends(
    endpoint: str, counter: Counter
) -> None:
    assert (cost(endpoint, counter, 64) - cost(endpoint, counter, 1)) / 63 <= 12
