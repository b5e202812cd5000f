"""What both sessions do about a connection that breaks and a daemon that is restarted, without any
waiting; scripts like those of `_calls`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from latentd_client._calls import Calls
from latentd_client._request import Call
from latentd_client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LatentdError,
    RequestRejected,
    SessionLost,
)
from latentd_client.keys import keys_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client._aio_link import AsyncLink
    from latentd_client._calls import Script
    from latentd_client._link import Link
    from latentd_client._stream import StreamReader
    from latentd_client.keys import CurveKeys
    from latentd_client.results import DaemonInfo

T = TypeVar("T")

RECOVERY_S: Final = 5.0
"""Longest wait for the first word after a broken connection."""
PAUSE_S: Final = 0.05
"""Between two attempts of a call that outlives its daemon."""


class BaseSession:
    """A session and what is known of its connection."""

    def __init__(
        self, endpoint: str, timeout_s: float, reopens: bool, keys: CurveKeys | None
    ) -> None:
        self.endpoint = endpoint
        self.keys = keys_for(endpoint, keys)
        self.calls = Calls(endpoint, timeout_s, reopens)
        self.timeout_s = self.calls.timeout_s
        self.is_closed = False
        self._pid = os.getpid()
        self._known_losses = 0
        self._is_mending = False

    def check_usable(self) -> Link | AsyncLink:
        """The connection. Raises what keeps calls from being made."""
        raise NotImplementedError

    def _follow(self, info: DaemonInfo) -> None:
        """Keep to what the daemon of a new session has told, and renew that one's lease."""
        raise NotImplementedError

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ConnectionLost("this client is of the parent process; make one after a fork")

    def _script(
        self, make: Callable[[], Script[T]], deadline: float, reader: StreamReader | None
    ) -> Script[T]:
        """A script of a call, behind what must be mended first. What has come for `reader` is
        handed out before the connection is looked at: its daemon may have left behind the end."""
        link, calls = self.check_usable(), self.calls
        if reader is not None and reader.is_at_hand:
            return make()
        if calls.is_lost or calls.orphans or link.losses() != self._known_losses:
            return self._mended(make, link, deadline)
        return make()

    def _outlives(self, error: LatentdError, session: str, deadline: float) -> bool:
        """Whether a call that has failed in this session may succeed in another life of the daemon,
        and there is time."""
        self.calls.note(error, session)
        return deadline - time.monotonic() > PAUSE_S and self.calls.survives(error)

    def _mended(
        self, make: Callable[[], Script[T]], link: Link | AsyncLink, deadline: float
    ) -> Script[T]:
        if self.calls.is_lost or link.losses() != self._known_losses:
            yield from self._mend(link, deadline)
        yield from self.calls.close_orphans()
        return (yield from make())

    def _mend(self, link: Link | AsyncLink, deadline: float) -> Script[None]:
        """After a broken connection: go on if the same daemon still knows the session, else with
        another session; one task does it for all. Raises ModelChanged."""
        while self._is_mending:
            if time.monotonic() >= deadline:
                text = f"the connection to {self.endpoint} is not made again yet"
                raise DeadlineExceeded(f"{text}; this call was not sent")
            yield PAUSE_S
        self.check_usable()
        self._is_mending = True
        try:
            yield from self._mend_now(link, min(deadline, time.monotonic() + RECOVERY_S))
        finally:
            self._is_mending = False

    def _mend_now(self, link: Link | AsyncLink, deadline: float) -> Script[None]:
        calls = self.calls
        if (losses := link.losses()) != self._known_losses:
            link.reconnect(_until(deadline))
            try:
                yield Call("resume", {"session": calls.session}, (), _until(deadline))
            except RequestRejected as refusal:
                if isinstance(calls.translate(refusal), SessionLost):
                    self._known_losses = losses  # the connection is good
                raise
            self._known_losses = losses
        if calls.is_lost:
            self._follow((yield from calls.hello(_until(deadline))))


def _until(deadline: float) -> float:
    """Seconds that are left."""
    return max(0.0, deadline - time.monotonic())
