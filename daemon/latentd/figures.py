"""Figures that one thread asks for and another one makes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client.protocol import Header

WAIT_S: Final = 0.25
"""How long to wait for fresh figures of a busy engine before the last ones are given."""


class Figures:
    """What the engine thread publishes when it is asked to, for the control thread."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` makes the engine thread call `publish` soon."""
        self._ask = ask
        self._values: Header = {}
        self._made_at = 0.0
        self._fresh = threading.Event()

    def publish(self, values: Header) -> None:
        """New figures, from the engine thread."""
        self._values = values
        self._made_at = time.monotonic()
        self._fresh.set()

    def get(self) -> Header:
        """Fresh figures, or the last ones when the engine thread is long in a step; `age_s` tells
        how old they are."""
        self._fresh.clear()
        self._ask()
        self._fresh.wait(WAIT_S)
        return {**self._values, "age_s": time.monotonic() - self._made_at}
