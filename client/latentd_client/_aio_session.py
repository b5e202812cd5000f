"""The asyncio client's session: moves the bytes that the scripts of `_calls` want moved. Tasks run
side by side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from typing import TYPE_CHECKING, TypeVar

from latentd_client._aio_link import AsyncLink
from latentd_client._base_session import PAUSE_S, BaseSession
from latentd_client._given import seconds
from latentd_client._handshake import no_hello
from latentd_client._request import Call, Pending
from latentd_client._weakly import weakly
from latentd_client.errors import ConnectionLost, DeadlineExceeded, LatentdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client._calls import Script
    from latentd_client._stream import StreamReader
    from latentd_client.keys import CurveKeys
    from latentd_client.results import DaemonInfo

T = TypeVar("T")


class AsyncSession(BaseSession):
    """A connection to a daemon and a session there, from `connect` on."""

    link: AsyncLink | None = None

    def __init__(
        self, endpoint: str, timeout_s: float, connect_timeout_s: float, reopens: bool,
        keys: CurveKeys | None,
    ) -> None:  # fmt: skip
        super().__init__(endpoint, timeout_s, reopens, keys)
        self._connect_timeout_s = seconds(connect_timeout_s, "connect_timeout_s")
        self._ended: asyncio.Future[None] | None = None  # of a close that has begun

    async def connect(self) -> None:
        """Connect and say hello, once. Raises ConnectionLost, RequestRejected."""
        if self.link is not None or self.is_closed:
            raise ConnectionLost("a client connects once: make a new one")
        link = self.link = AsyncLink(self.endpoint, self.keys)
        self._forgotten = weakref.finalize(self, _forget, link, self._pid)
        self._forgotten.atexit = False
        limit_s = self._connect_timeout_s
        deadline = time.monotonic() + limit_s
        try:
            await link.shake_hands(limit_s)
            info = await self._drive(self.calls.hello(limit_s), deadline)
            link.watch(info, self.calls.session)
        except BaseException as error:
            self.is_closed = True
            self._release()
            if isinstance(error, DeadlineExceeded):
                raise no_hello(self.endpoint, limit_s) from None
            raise
        close_orphans = weakly(self._close_orphans)
        self.calls.on_orphan = lambda: link.loop.call_soon(close_orphans)

    async def run(
        self, make: Callable[[], Script[T]], timeout_s: float | None,
        reader: StreamReader | None = None,
    ) -> T:  # fmt: skip
        """See `Session.run`; tasks do not take turns."""
        limit_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        if self.link is not None and not self.link.is_here():
            self._check_process()
            raise ConnectionLost("this client belongs to another event loop; make one in each")
        deadline = time.monotonic() + limit_s
        while True:
            session, script = self.calls.session, self._script(make, deadline, reader)
            try:
                return await self._drive(script, deadline)
            except LatentdError as error:
                if not self._outlives(error, session, deadline):
                    raise self.calls.translate(error) from None
            await asyncio.sleep(PAUSE_S)

    async def run_now(self, script: Script[None]) -> None:
        """Drive a script that waits for nothing, if all is well."""
        link = self.link
        if self.is_closed or link is None or link.losses() != self._known_losses:
            return
        with contextlib.suppress(LatentdError):  # it is a courtesy
            await self._drive(script, time.monotonic())

    async def close(self) -> None:
        """End the session and the connection; a second time does nothing."""
        if self._pid != os.getpid():
            self.is_closed = True  # the parent goes on with the session and the connection
            return
        if self._ended is not None:  # another task closes it
            await asyncio.shield(self._ended)
        if self.is_closed:
            return
        self.is_closed = True
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._end_session()
        finally:  # also when it is cancelled
            self._release()
            self._ended.set_result(None)
            self._ended = None

    async def _end_session(self) -> None:
        """Tell the daemon, if it is there; in another event loop without an answer."""
        link = self.link
        is_known = self.calls.session and not self.calls.is_lost
        if link is None or not is_known or link.losses() != self._known_losses:
            return
        with contextlib.suppress(LatentdError):
            if link.is_here():
                await self._drive(self.calls.end_session(1.0), time.monotonic() + 1.0)
            else:
                link.send_now(Call("close", {"session": self.calls.session}, expect=False))

    def _release(self) -> None:
        if self.link is not None:
            self._forgotten.detach()
            self.link.close()

    def check_usable(self) -> AsyncLink:
        """See `BaseSession.check_usable`."""
        self._check_process()
        if self.is_closed or self.link is None:
            raise ConnectionLost("the client is closed" if self.is_closed else "connect first")
        if self.calls.gone is not None:
            raise self.calls.gone
        return self.link

    def _follow(self, info: DaemonInfo) -> None:
        self.check_usable().follow(info, self.calls.session)

    def _close_orphans(self) -> None:
        """A slot has come that nobody wants."""
        for call in self.calls.close_orphans():
            if isinstance(call, Call) and self.link is not None and not self.is_closed:
                self.link.send_now(call)

    async def _drive(self, script: Script[T], deadline: float) -> T:
        """Move the bytes that a script wants moved, until the deadline."""
        try:
            item = next(script)
            while True:
                try:
                    reply = await self._move(item, deadline - time.monotonic())
                except BaseException as error:
                    item = script.throw(error)
                else:
                    item = script.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _move(self, item: Call | Pending | float, limit_s: float) -> object:
        """See `Session.move`."""
        assert self.link is not None
        if isinstance(item, Call):
            return await self.link.perform(item, item.time(limit_s))
        if isinstance(item, Pending):
            return await self.link.wait(item, item.call.time(limit_s))
        await asyncio.sleep(item)
        return None


def _forget(link: AsyncLink, pid: int) -> None:
    """See `_session._forget`."""
    if pid != os.getpid():
        return
    try:
        link.loop.call_soon_threadsafe(link.close)
    except RuntimeError:  # the event loop has ended
        link.leave()
