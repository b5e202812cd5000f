"""The asyncio client: the same calls as `client`, moved by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, TypeVar

from latentd_client._aio_link import AsyncLink, forget
from latentd_client._asked import asked
from latentd_client._attending import attend
from latentd_client._calls import Calls
from latentd_client._exchange import Call
from latentd_client._given import data_endpoint
from latentd_client._handshake import check_listener
from latentd_client._transfer import Adopting
from latentd_client.aio_slot import AsyncSlot
from latentd_client.control import Control
from latentd_client.errors import ConnectionLost, DeadlineExceeded, LatentdError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._exchange import Pending, Reply
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client.pages import Pages
    from latentd_client.protocol import Header
    from latentd_client.results import DaemonInfo, Sampling, Step

T = TypeVar("T")


class AsyncClient:
    """A connection to a daemon and a session there: `async with AsyncClient() as client`, or
    `await AsyncClient().connect()`.

    Tasks of one event loop may share a client, and their requests run side by side. It is not
    thread-safe. After a fork, and in another event loop, make a new client.
    """

    info: DaemonInfo

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        """Takes what `Client` takes; connects in `connect`."""
        self.endpoint = data_endpoint(endpoint)
        self._calls = Calls(timeout_s)
        self.timeout_s = self._calls.timeout_s
        self.is_closed = False
        self._connect_timeout_s = connect_timeout_s
        self._link: AsyncLink | None = None
        self._control: Control | None = None
        self._control_lock = threading.Lock()
        self._pid = os.getpid()
        self._ended: asyncio.Future[None] | None = None  # of a close that has begun
        self._known_losses = 0
        self._gone: ConnectionLost | None = None

    async def connect(self) -> AsyncClient:
        """Connect and say hello, once. Raises ConnectionLost, RequestRejected."""
        if self._link is not None or self.is_closed:
            raise ConnectionLost("a client connects once: make a new one")
        link = self._link = AsyncLink(self.endpoint)
        self._forgotten = weakref.finalize(self, forget, link, self._pid)
        self._forgotten.atexit = False
        try:
            self.info = await self._drive(self._calls.hello(self._connect_timeout_s))
            link.watch(self.info, self._calls.session)
        except BaseException as error:
            self.is_closed = True
            self._release()
            if isinstance(error, DeadlineExceeded):
                text = f"{self.endpoint} did not say hello within {self._connect_timeout_s:.3g} s"
                raise ConnectionLost(text) from None
            raise
        link.exchange.max_frame_bytes = self.info.max_frame_bytes
        link.exchange.max_frames = self.info.max_frames
        return self

    async def open(
        self, prompt: Prompt, *, sampling: Sampling | None = None, logits: bool = False,
        logprobs: int = 0, prompt_logprobs: int | None = None, bias: Bias | None = None,
        mask: Mask | None = None, salt: str = "", key: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Client.open`."""
        script = self._calls.open(
            lambda header, raw: AsyncSlot(self, header, raw, prompt), prompt,
            asked(sampling, logits, logprobs, bias, mask), prompt_logprobs, salt, key, timeout_s,
        )  # fmt: skip
        return await self._run(script)

    async def step(
        self, rows: Iterable[tuple[AsyncSlot, int | None]], *, logits: bool = False,
        logprobs: int = 0, masks: Sequence[Mask | None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Step]:  # fmt: skip
        """See `Client.step`."""
        extras = asked(None, logits, logprobs)
        return await self._run(self._calls.step_rows(rows, extras, masks, timeout_s))

    async def attend(
        self, layer: int, rows: Iterable[tuple[AsyncSlot, int]], q: T, latent: Any, *,
        timeout_s: float | None = None,
    ) -> T:  # fmt: skip
        """See `Client.attend`."""
        script: Script[T] = attend(self._calls, layer, rows, q, latent, timeout_s)
        return await self._run(script)

    async def adopt(
        self, pages: Pages, *, sampling: Sampling | None = None, salt: str = "",
        key: str | None = None, timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Client.adopt`; takes the pages of either client."""
        adopting = Adopting.of(self._calls, pages, sampling, salt, key, timeout_s)
        try:
            await self._run(adopting.begin())
            if isinstance(pages.pieces, AsyncIterable):
                async for piece in pages.pieces:
                    await self._run(adopting.put(piece))
            else:
                for piece in pages.pieces:
                    await self._run(adopting.put(piece))
        except BaseException:
            if not self.is_closed:
                with contextlib.suppress(LatentdError):
                    await self._run(adopting.drop())
            raise
        return await self._run(adopting.commit(lambda header, raw: AsyncSlot(self, header, raw)))

    async def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip to the engine thread."""
        start = time.perf_counter()
        await self._run(self._calls.ping(timeout_s))
        return time.perf_counter() - start

    async def health(self) -> Header:
        """See `Control.health`; asked on a worker thread."""
        return await asyncio.to_thread(lambda: self._get_control().health())

    async def stats(self) -> Header:
        """See `Control.stats`; asked on a worker thread."""
        return await asyncio.to_thread(lambda: self._get_control().stats())

    async def close(self) -> None:
        """Give all slots back, end the session and the connection; a second time does nothing."""
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
        link = self._link
        if link is None or not self._calls.session or self._gone is not None:
            return
        if link.losses != self._known_losses:
            return
        with contextlib.suppress(LatentdError):
            if link.is_here():
                await self._drive(self._calls.end_session(1.0))
            else:
                call = Call("close", {"session": self._calls.session}, expect=False)
                await link.perform(call, 1.0)

    def _release(self) -> None:
        if self._link is not None:
            self._forgotten.detach()
            self._link.close()
        if self._control is not None:
            self._control.close()

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    def _get_control(self) -> Control:
        self._check_usable()
        with self._control_lock:
            if self._control is None:
                self._control = Control(self.info.control)
            return self._control

    def _check_usable(self) -> AsyncLink:
        """Raise ConnectionLost when no call can be made any more, or here."""
        if self._pid != os.getpid():
            raise ConnectionLost("this client is of the parent process; make one after a fork")
        if self.is_closed or self._link is None:
            raise ConnectionLost("the client is closed" if self.is_closed else "connect first")
        if self._gone is not None:
            raise self._gone
        return self._link

    async def _run(self, script: Script[T]) -> T:
        link = self._check_usable()
        if not link.is_here():
            raise ConnectionLost("this client belongs to another event loop; make one in each")
        try:
            if link.losses != self._known_losses:
                await self._recover(link)
            if self._calls.orphans:
                await self._drive(self._calls.close_orphans())
            return await self._drive(script)
        except RequestRejected as refusal:
            error = self._calls.translate(refusal)
            if isinstance(error, ConnectionLost):
                self._gone = error
            raise error from None

    async def _recover(self, link: AsyncLink) -> None:
        """After a broken connection: go on if the same daemon still knows the session."""
        losses = link.losses
        check_listener(self.endpoint)
        call = Call("resume", {"session": self._calls.session})
        await link.perform(call, min(5.0, self.timeout_s))
        self._known_losses = losses

    async def _drive(self, script: Script[T]) -> T:
        """Move the bytes that a script wants moved."""
        try:
            item = next(script)
            while True:
                try:
                    reply = await self._move(item)
                except BaseException as error:
                    item = script.throw(error)
                else:
                    item = script.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _move(self, item: Call | Pending) -> Reply | None:
        assert self._link is not None
        call = item if isinstance(item, Call) else item.call
        limit_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        if isinstance(item, Call):
            return await self._link.perform(item, limit_s)
        return await self._link.wait(item, limit_s)
