"""Whose turn it is to use a client."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from latentd_client.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Turns:
    """One thread at a time. An interrupt (Ctrl-C) leaves the lock free when nobody else waits: the
    interpreter looks for signals behind a call, so behind a call of `acquire` too, before anything
    could note it, but not between the entry of `with lock` and its block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def run(self, limit_s: float, body: Callable[[], T]) -> T:
        """Run something when the turn has come. Raises DeadlineExceeded after `limit_s` without."""
        lock = self._lock
        if not lock.locked():
            with lock:
                return body()
        if not lock.acquire(timeout=limit_s):
            raise DeadlineExceeded(
                f"another thread's call took all of {limit_s:.3g} s; this one was not sent"
            )
        try:
            return body()
        finally:
            lock.release()

    def run_at_once(self, body: Callable[[], None]) -> None:
        """Run something if nobody has the turn, without any waiting; not on the main thread, where
        an interrupt could leave the lock held."""
        if self._lock.acquire(blocking=False):
            try:
                body()
            finally:
                self._lock.release()

    def run_if_free(self, body: Callable[[], None]) -> None:
        """Run something if nobody has the turn."""
        if not self._lock.locked():
            with self._lock:
                body()
