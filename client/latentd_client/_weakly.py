"""Callbacks that do not keep alive what they call."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method of something, if that is still there."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        if bound := known():
            bound()

    return call
