"""Ways for tests to hold an engine back and to wait for something."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakes import FakeEngine


PATIENCE_S: Final = 120.0
"""Longest wait for what comes at once: a busy machine may give a thread its next turn late."""


class Gate:
    """Holds the launches of a fake engine back while it is shut."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._event = threading.Event()
        self._event.set()
        wait = engine.fake.wait

        def held() -> Any:
            assert self._event.wait(2 * PATIENCE_S)
            return wait()

        engine.fake.wait = held  # type: ignore[method-assign]

    def shut(self) -> None:
        self._event.clear()

    def open(self) -> None:
        self._event.set()

    def await_launch(self) -> None:
        """Until one is held back: what is in it has begun, and nobody is answered."""
        wait_until(lambda: self._engine.launches.in_flight)


def slow_down(engine: FakeEngine, launch_s: float) -> None:
    """Have each launch take so long."""
    wait = engine.fake.wait

    def slow() -> Any:
        time.sleep(launch_s)
        return wait()

    engine.fake.wait = slow  # type: ignore[method-assign]


def wait_until(condition: Callable[[], object]) -> None:
    """Poll a condition for at most PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {PATIENCE_S} s"
        time.sleep(0.02)
