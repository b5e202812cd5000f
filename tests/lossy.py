"""Clients whose replies are lost on their way."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from latentd_client import Client, DeadlineExceeded
from latentd_client._exchange import _read

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client import AsyncClient
    from latentd_client._request import Pending, Reply


def lossy(client: Any, is_lost: Callable[[list[bytes]], bool], **fields: Any) -> Any:
    """Have a client's replies lost from now on; a `Blocking` one's too."""
    if isinstance(client, Client):
        return LossyWire(client, is_lost, **fields)
    return LossyLink(client._target, is_lost, **fields)


def num_pending(client: Any) -> int:
    """How many requests a client still waits for."""
    link = client._session.link if isinstance(client, Client) else client._target._session.link
    return len(link.exchange._pending)


class LossyWire:
    """Stands for a client's wire from now on. `is_lost` says of each message whether it is lost; if
    a call waits for it, its time is then over at once. With `may_come_late` every other lost
    message comes after all, before the next one."""

    def __init__(
        self, client: Client, is_lost: Callable[[list[bytes]], bool], may_come_late: bool = False
    ) -> None:
        link = client._session.link
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


class LossyLink:
    """The same for an asynchronous client: what waits for a message that is lost, or comes to wait
    for it later, has its time over at once."""

    def __init__(
        self, client: AsyncClient, is_lost: Callable[[list[bytes]], bool],
        may_come_late: bool = False,
    ) -> None:  # fmt: skip
        assert client._session.link is not None
        self._link: Any = client._session.link
        self._receive, self._wait = self._link.exchange.receive, self._link.wait
        self._is_lost = is_lost
        self._may_come_late = may_come_late
        self._late: deque[list[bytes]] = deque()
        self._missed: set[int] = set()
        self.lost = 0
        link = self._link
        link.exchange.receive, link.wait = self._take, self._wait_for  # type: ignore[method-assign]

    async def _wait_for(
        self, pending: Pending, limit_s: float, deadline: float | None = None
    ) -> Reply:
        """AsyncLink.wait."""
        if pending.request_id not in self._missed:
            with contextlib.suppress(DeadlineExceeded):
                reply: Reply = await self._wait(pending, limit_s, deadline)
            if pending.request_id not in self._missed:
                return reply
        self._missed.discard(pending.request_id)
        raise DeadlineExceeded("the reply was lost")

    def _take(self, frames: list[bytes]) -> None:
        """Exchange.receive."""
        while self._late:
            self._receive(self._late.popleft())
        if not self._is_lost(frames):
            self._receive(frames)
            return
        self.lost += 1
        if self._may_come_late and self.lost % 2:
            self._late.append(frames)
        pending = self._link.exchange._pending.get(_read(frames).header["id"])
        if pending is not None:
            self._missed.add(pending.request_id)
            if pending.wake is not None:
                pending.wake()
