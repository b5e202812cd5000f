"""A client whose replies are lost on their way."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from latentd_client import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client import Client


class LossyWire:
    """Stands for a client's wire from now on. `is_lost` says of each message whether it is lost:
    the time of the call that waits is then over at once. With `may_come_late` every other lost
    message comes after all, before the next one."""

    def __init__(
        self, client: Client, is_lost: Callable[[list[bytes]], bool], may_come_late: bool = False
    ) -> None:
        self._wire: Any = client._link.wire
        self._is_lost = is_lost
        self._may_come_late = may_come_late
        self._late: deque[list[bytes]] = deque()
        self.lost = 0
        client._link.wire = self

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
        raise DeadlineExceeded("the reply was lost")

    def poll(self, timeout_ms: int) -> bool:
        """See Wire.poll."""
        return bool(self._late) or bool(self._wire.poll(timeout_ms))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)
