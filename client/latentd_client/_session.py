"""The blocking client's session: moves the bytes that the scripts of `_calls` want moved, and takes
turns among threads."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import TYPE_CHECKING, TypeVar

from latentd_client._base_session import PAUSE_S, BaseSession
from latentd_client._given import MAX_TIMEOUT_S, seconds
from latentd_client._handshake import no_hello
from latentd_client._link import Link
from latentd_client._request import Call, Pending
from latentd_client._turns import Turns
from latentd_client._watch import Watch
from latentd_client._wire import ZmqWire
from latentd_client.errors import ConnectionLost, DeadlineExceeded, LatentdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client._calls import Script
    from latentd_client._stream import StreamReader
    from latentd_client.keys import CurveKeys
    from latentd_client.results import DaemonInfo

T = TypeVar("T")


class Session(BaseSession):
    """A connection to a daemon and a session there. Threads take turns."""

    def __init__(
        self, endpoint: str, timeout_s: float, connect_timeout_s: float, spin_s: float,
        reopens: bool, keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """Connect and say hello. Raises ConnectionLost, RequestRejected."""
        super().__init__(endpoint, timeout_s, reopens, keys)
        self.turns = Turns()
        limit_s, start = seconds(connect_timeout_s, "connect_timeout_s"), time.monotonic()
        link = self.link = Link(endpoint, seconds(spin_s, "spin_s"), limit_s, self.keys)
        try:
            left_s = max(0.0, limit_s - (time.monotonic() - start))
            info = self._drive(self.calls.hello(left_s), start + limit_s)
            calls, turns = self.calls, self.turns
            self._watch = Watch(
                link.wire.meeting, info.control, self.keys, calls.session, info.lease_s,
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
        """Drive a script when its turn has come; where slots are opened again, make and drive it
        again as long as that may help and there is time. `reader` is that of a stream's step."""
        limit_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        self._check_process()

        def attempts() -> T:
            deadline = time.monotonic() + limit_s
            while True:
                session, script = self.calls.session, self._script(make, deadline, reader)
                try:
                    return self._drive(script, deadline)
                except LatentdError as error:
                    if not self._outlives(error, session, deadline):
                        raise self.calls.translate(error) from None
                time.sleep(PAUSE_S)

        return self.turns.run(limit_s, attempts)

    def run_now(self, script: Script[None]) -> None:
        """Drive a script that waits for nothing, if nobody else is at it and all is well."""

        def drive() -> None:
            if not self.is_closed and self.link.losses() == self._known_losses:
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
            if not self.calls.is_lost and self.link.losses() == self._known_losses:
                self._drive(self.calls.end_session(1.0), time.monotonic() + 1.0)
        except LatentdError:
            pass  # the lease will end it
        finally:  # also when it is interrupted
            self._forgotten.detach()
            self._watch.stop()
            self.link.close()

    def check_usable(self) -> Link:
        """See `BaseSession.check_usable`."""
        if self.is_closed:
            raise ConnectionLost("the client is closed")
        if self.calls.gone is not None:
            raise self.calls.gone
        return self.link

    def _follow(self, info: DaemonInfo) -> None:
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

    def move(self, item: Call | Pending | float, limit_s: float) -> object:
        """Send a call, or wait for the next reply of one, for its own time or at most `limit_s`; or
        sleep for so many seconds."""
        if isinstance(item, Call):
            return self.link.perform(item, item.time(limit_s))
        if isinstance(item, Pending):
            return self.link.wait(item, item.call.time(limit_s))
        time.sleep(item)
        return None


def _forget(watch: Watch, link: Link, pid: int) -> None:
    """Nobody knows the client any more and nobody has closed it: stop to renew its lease. Without
    any waiting: an interrupt is ignored while something is being collected."""
    if pid == os.getpid():
        watch.leave(link.close)
