"""A client that works beside a fault: it must not notice."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from latentd_client import Client

if TYPE_CHECKING:
    from latentd_client import Slot

PROMPT: Final = tuple(range(1, 100))


class Beside:
    """A context manager: within it a client steps on a thread; at its end its bits must be those
    that an undisturbed client gets afterwards, and there must have been no error."""

    def __init__(self, endpoint: str, least: int = 5) -> None:
        """`least`: how many steps it takes, however short the time is."""
        self._client = Client(endpoint, timeout_s=60)
        self._least = least
        self._is_over = threading.Event()
        self._bits: list[bytes] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            with self._client.open(PROMPT) as slot:
                while not self._is_over.is_set() or len(self._bits) < self._least:
                    self._bits.append(logits(slot))
                    self._is_over.wait(0.002)
        except Exception as error:
            self._error = error

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        with self._client:
            assert self._error is None, self._error
            with self._client.open(PROMPT) as slot:
                for bits in self._bits:
                    assert logits(slot) == bits


def logits(slot: Slot) -> bytes:
    """The bits of the slot's next step."""
    step = slot.step(logits=True)
    assert step.logits is not None
    return step.logits.tobytes()
