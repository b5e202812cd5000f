"""The blocking client's session: moves the bytes that the scripts of `_calls` want moved, takes
turns among threads, and goes on after a broken connection."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

from latentd_client._calls import Calls
from latentd_client._given import MAX_TIMEOUT_S, seconds
from latentd_client._handshake import no_hello
from latentd_client._link import Link
from latentd_client._request import Call, Pending
from latentd_client._turns import Turns
from latentd_client._watch import Watch
from latentd_client._wire import ZmqWire
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

    from latentd_client._calls import Script
    from latentd_client._stream import StreamReader
    from latentd_client.keys import CurveKeys

T = TypeVar("T")

RECOVERY_S: Final = 5.0
"""Longest wait for the first word after a broken connection."""
PAUSE_S: Final = 0.05
"""Between two attempts of a call that outlives its daemon."""


class Session:
    """A connection to a daemon and a session there. Threads take turns."""

    def __init__(
        self, endpoint: str, timeout_s: float, connect_timeout_s: float, spin_s: float,
        reopens: bool, keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """Connect and say hello. Raises ConnectionLost, RequestRejected."""
        self.endpoint = endpoint
        self.keys = keys = keys_for(endpoint, keys)
        self.calls = Calls(endpoint, timeout_s, reopens)
        self.timeout_s = self.calls.timeout_s
        self.turns = Turns()
        self.is_closed = False
        self._pid = os.getpid()
        self._known_losses = 0
        limit_s, start = seconds(connect_timeout_s, "connect_timeout_s"), time.monotonic()
        link = self.link = Link(endpoint, seconds(spin_s, "spin_s"), limit_s, keys)
        try:
            left_s = max(0.0, limit_s - (time.monotonic() - start))
            info = self._drive(self.calls.hello(left_s), start + limit_s)
            calls, turns = self.calls, self.turns
            self._watch = Watch(
                link.wire.meeting, info.control, keys, calls.session, info.lease_s,
                lambda: link.renew(calls.session, turns),
            )  # fmt: skip
        except BaseException as error:
            link.close()
            if isinstance(error, DeadlineExceeded):
                raise no_hello(endpoint, limit_s) from None
            raise
        self._forgotten = weakref.finalize(self, _forget, self._watch, link, self._pid)
        self._forgotten.atexit = False
        link.exchange.heed(info)
        if isinstance(link.wire, ZmqWire):
            link.wire.watch(self._watch)

    def run(
        self, make: Callable[[], Script[T]], timeout_s: float | None,
        reader: StreamReader | None = None,
    ) -> T:  # fmt: skip
        """Drive a script, when its turn has come; where slots are opened again, make and drive it
        again as long as that may help and there is time. What has come for `reader` is handed out
        before the connection is looked at: its daemon may have left behind the end."""
        limit_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        if self._pid != os.getpid():
            raise ConnectionLost("this client is of the parent process; make one after a fork")
        attempt = self._endure if self.calls.reopens else self._attempt
        return self.turns.run(limit_s, lambda: attempt(make, time.monotonic() + limit_s, reader))

    def run_now(self, script: Script[None]) -> None:
        """Drive a script that waits for nothing, if nobody else is at it and all is well."""

        def drive() -> None:
            if not self.is_closed and self.link.wire.losses() == self._known_losses:
                with contextlib.suppress(LatentdError):  # it is a courtesy
                    self._drive(script, time.monotonic())

        if self._pid == os.getpid():
            self.turns.run_if_free(drive)

    def close(self) -> None:
        """End the session and the connection; a second time does nothing."""
        if self._pid != os.getpid():
            self.is_closed = True  # the parent goes on with the session and the connection
            return
        self.turns.run(MAX_TIMEOUT_S, self._close)

    def _close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if not self.calls.is_lost and self.link.wire.losses() == self._known_losses:
                self._drive(self.calls.end_session(1.0), time.monotonic() + 1.0)
        except LatentdError:
            pass  # the lease will end it
        finally:  # also when it is interrupted
            self._forgotten.detach()
            self._watch.stop()
            self.link.close()

    def _endure(
        self, make: Callable[[], Script[T]], deadline: float, reader: StreamReader | None
    ) -> T:
        """Attempts until one succeeds, or fails in a way that no other life of the daemon mends."""
        while True:
            try:
                return self._attempt(make, deadline, reader)
            except LatentdError as error:
                left_s = deadline - time.monotonic() - PAUSE_S
                if self.is_closed or left_s <= 0 or not self.calls.survives(error):
                    raise
            time.sleep(PAUSE_S)

    def _attempt(
        self, make: Callable[[], Script[T]], deadline: float, reader: StreamReader | None
    ) -> T:
        try:
            self._check_usable()
            if reader is None or not reader.is_at_hand:
                self._make_ready(deadline)
            return self._drive(make(), deadline)
        except RequestRejected as refusal:
            raise self.calls.note(refusal, self.calls.session) from None

    def _check_usable(self) -> None:
        """Raise when no call can be made any more."""
        if self.is_closed:
            raise ConnectionLost("the client is closed")
        if self.calls.gone is not None:
            raise self.calls.gone

    def _make_ready(self, deadline: float) -> None:
        """Before a call: mend connection and session, close what nobody wants."""
        if self.link.wire.losses() != self._known_losses or self.calls.is_lost:
            self._mend(min(deadline, time.monotonic() + RECOVERY_S))
        if self.calls.orphans:
            self._drive(self.calls.close_orphans(), deadline)

    def _mend(self, deadline: float) -> None:
        """After a broken connection: go on if the same daemon still knows the session, else with
        another session. Raises ModelChanged."""
        if (losses := self.link.wire.losses()) != self._known_losses:
            self.link.wire.reconnect(max(0.0, deadline - time.monotonic()))
            self.link.exchange.abandon_all()
            try:
                self.move(
                    Call("resume", {"session": self.calls.session}), deadline - time.monotonic()
                )
            except RequestRejected as refusal:
                if isinstance(self.calls.translate(refusal), SessionLost):
                    self._known_losses = losses  # the connection is good
                raise
            self._known_losses = losses
        if self.calls.is_lost:
            info = self._drive(self.calls.hello(RECOVERY_S), deadline)
            self.link.exchange.heed(info)
            self._watch.follow(info.control, self.calls.session, info.lease_s)

    def _drive(self, script: Script[T], deadline: float) -> T:
        """Move the bytes that a script wants moved, until the deadline."""
        try:
            item = next(script)
            while True:
                try:
                    reply = self.move(item, deadline - time.monotonic())
                except BaseException as error:
                    item = script.throw(error)
                else:
                    item = script.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            value: T = stop.value
            return value

    def move(self, item: Call | Pending, limit_s: float) -> object:
        """Send a call, or wait for the next reply of one, for its own time or at most `limit_s`."""
        if isinstance(item, Call):
            return self.link.perform(item, item.time(limit_s))
        return self.link.wait(item, item.call.time(limit_s))


def _forget(watch: Watch, link: Link, pid: int) -> None:
    """Nobody knows the client any more and nobody has closed it: stop to renew its lease. Without
    any waiting: an interrupt is ignored while something is being collected."""
    if pid == os.getpid():
        watch.leave(link.close)
