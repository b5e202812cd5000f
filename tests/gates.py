"""Ways for tests to hold an engine back and to wait for something."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakes import FakeEngine


class Gate:
    """Holds the launches of a fake engine back while it is shut."""

    def __init__(self, engine: FakeEngine) -> None:
        self._event = threading.Event()
        self._event.set()
        wait = engine.fake.wait

        def held() -> Any:
            assert self._event.wait(10)
            return wait()

        engine.fake.wait = held  # type: ignore[method-assign]

    def shut(self) -> None:
        self._event.clear()

    def open(self) -> None:
        self._event.set()


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition for at most 10 s."""
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 10 s")
