"""A client whose replies are lost on their way."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from latentd_client import DeadlineExceeded
from latentd_client._exchange import _read

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client import Client
    from latentd_client._exchange import Pending, Reply


class LossyWire:
    """Stands for a client's wire from now on. `is_lost` says of each message whether it is lost; if
    a call waits for it, its time is then over at once. With `may_come_late` every other lost
    message comes after all, before the next one."""

    def __init__(
        self, client: Client, is_lost: Callable[[list[bytes]], bool], may_come_late: bool = False
    ) -> None:
        link = client._link
        self._wire: Any = link.wire
        self._wait = link.wait
        self._is_lost = is_lost
        self._may_come_late = may_come_late
        self._late: deque[list[bytes]] = deque()
        self._waited_for = 0
        self.lost = 0
        link.wire, link.wait = self, self._note  # type: ignore[method-assign]

    def _note(self, pending: Pending, timeout_s: float, deadline: float | None = None) -> Reply:
        """Link.wait, whose request is noted."""
        self._waited_for = pending.request_id
        return self._wait(pending, timeout_s, deadline)

    def receive(self) -> list[bytes] | None:
        """See Wire.receive."""
        if self._late:
            return self._late.popleft()
        message: list[bytes] | None = self._wire.receive()
        if message is None or not self._is_lost(message):
            return message
        self.lost += 1
        if self._may_come_late and self.lost % 2:
            self._late.append(message)
        if _read(message).header["id"] == self._waited_for:
            raise DeadlineExceeded("the reply was lost")
        return None

    def poll(self, timeout_ms: int) -> bool:
        """See Wire.poll."""
        return bool(self._late) or bool(self._wire.poll(timeout_ms))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)
