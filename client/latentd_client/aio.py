"""The asyncio client: the same calls as `client`, moved by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, TypeVar

import zmq

from latentd_client import _link, _wire, protocol
from latentd_client._calls import Calls
from latentd_client._exchange import Call, Exchange, Pending, Reply, too_late
from latentd_client._handshake import check_listener
from latentd_client._watch import Watch
from latentd_client.aio_slot import AsyncSlot
from latentd_client.control import Control
from latentd_client.errors import ConnectionLost, DeadlineExceeded, LatentdError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from latentd_client._calls import Prompt, Script
    from latentd_client.protocol import Header
    from latentd_client.results import DaemonInfo, Sampling, Step

T = TypeVar("T")
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""Plain ints: zmq's enums cost a microsecond for each `&` and `|`."""


class AsyncClient:
    """A connection to a daemon and a session there: `async with AsyncClient() as client`, or
    `await AsyncClient().connect()`.

    Tasks of one event loop may share a client, and their requests run side by side. It is not
    thread-safe.
    """

    info: DaemonInfo

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        """Takes what `Client` takes; connects in `connect`."""
        self.endpoint = endpoint or os.environ.get("LATENTD_ENDPOINT") or protocol.DEFAULT_ENDPOINT
        self._calls = Calls(timeout_s)
        self.timeout_s = self._calls.timeout_s
        self.is_closed = False
        self._connect_timeout_s = connect_timeout_s
        self._exchange = Exchange()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: Watch | None = None
        self._control: Control | None = None
        self._known_losses = 0
        self._gone: ConnectionLost | None = None

    async def connect(self) -> AsyncClient:
        """Connect and say hello. Raises ConnectionLost, RequestRejected."""
        loop = self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        sock = self._socket = _wire.make_socket(self._context)
        sock.setsockopt(zmq.RCVTIMEO, 0)
        sock.setsockopt(zmq.SNDTIMEO, 0)
        try:
            _wire.connect(sock, self.endpoint)
            loop.add_reader(int(sock.getsockopt(zmq.FD)), self._receive)
            self.info = await self._drive(self._calls.hello(self._connect_timeout_s))
        except BaseException as error:
            await self.close()
            if isinstance(error, DeadlineExceeded):
                text = f"{self.endpoint} did not say hello within {self._connect_timeout_s:.3g} s"
                raise ConnectionLost(text) from None
            raise
        self._watch = Watch(
            sock, self.info.control, self._calls.session, self.info.lease_s,
            lambda: loop.call_soon_threadsafe(self._wake_all),
        )  # fmt: skip
        self._exchange.max_frame_bytes = self.info.max_frame_bytes
        self._exchange.max_frames = self.info.max_frames
        return self

    async def open(
        self, prompt: Prompt, *, sampling: Sampling | None = None, logits: bool = False,
        key: str | None = None, timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Client.open`."""
        script = self._calls.open(
            lambda header, raw: AsyncSlot(self, header, raw),
            prompt, sampling, logits, key, timeout_s,
        )  # fmt: skip
        return await self._run(script)

    async def step(
        self, rows: Iterable[tuple[AsyncSlot, int | None]], *, logits: bool = False,
        timeout_s: float | None = None,
    ) -> list[Step]:  # fmt: skip
        """See `Client.step`."""
        return await self._run(self._calls.step_rows(rows, logits, timeout_s))

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
        if self.is_closed:
            return
        self.is_closed = True
        if self._watch is not None:
            if self._gone is None and self._watch.losses == self._known_losses:
                with contextlib.suppress(LatentdError):
                    await self._drive(self._calls.end_session(1.0))
            self._watch.stop()
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
            self._socket.close()
        if self._control is not None:
            self._control.close()
        if self._context is not None:
            self._context.term()
        for pending in self._exchange.abandon_all():
            pending.connection = -1
            if pending.wake is not None:
                pending.wake()

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    def _get_control(self) -> Control:
        if self._control is None:
            self._control = Control(self.info.control)
        return self._control

    async def _run(self, script: Script[T]) -> T:
        if self.is_closed or self._watch is None:
            raise ConnectionLost("the client is closed" if self.is_closed else "connect first")
        if self._gone is not None:
            raise self._gone
        try:
            if self._watch.losses != self._known_losses:
                await self._recover()
            if self._calls.orphans:
                await self._drive(self._calls.close_orphans())
            return await self._drive(script)
        except RequestRejected as refusal:
            error = self._calls.translate(refusal)
            if isinstance(error, ConnectionLost):
                self._gone = error
            raise error from None

    async def _recover(self) -> None:
        """After a broken connection: go on if the same daemon still knows the session."""
        losses = self._losses()
        check_listener(self.endpoint)
        call = Call("resume", {"session": self._calls.session}, timeout_s=min(5.0, self.timeout_s))
        await self._perform(call)
        self._known_losses = losses

    async def _drive(self, script: Script[T]) -> T:
        """Move the bytes that a script wants moved."""
        try:
            item = next(script)
            while True:
                try:
                    reply = await (
                        self._perform(item) if isinstance(item, Call) else self._next(item)
                    )
                except BaseException as error:
                    item = script.throw(error)
                else:
                    item = script.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _perform(self, call: Call) -> Reply | None:
        pending, frames = self._exchange.start(call)
        pending.connection = self._losses()
        limit_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        deadline = time.monotonic() + limit_s
        try:
            while not self._send(frames):  # not connected (yet, or any more), or its queue is full
                if not call.expect:
                    return None
                self._check(pending)
                if time.monotonic() >= deadline:
                    raise too_late(call, limit_s)
                await asyncio.sleep(0.002)
            return await self._next(pending, deadline) if call.expect else None
        except BaseException:
            if not call.is_kept:
                self._exchange.abandon(pending)
            raise

    def _send(self, frames: list[bytes | memoryview]) -> bool:
        assert self._socket is not None
        try:
            self._socket.send_multipart(frames, NOBLOCK)
        except zmq.Again:
            return False
        self._receive()  # sending may have eaten the edge that announced a message
        return True

    def _receive(self) -> None:
        """Take all messages that are there; the descriptor of a socket is edge-triggered."""
        sock = self._socket
        if sock is None or sock.closed:
            return
        while int(sock.getsockopt(EVENTS)) & POLLIN:
            self._exchange.receive(sock.recv_multipart(NOBLOCK))

    async def _next(self, pending: Pending, deadline: float | None = None) -> Reply:
        """The next reply of a request."""
        call, loop = pending.call, self._loop
        assert loop is not None
        limit_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        left_s = limit_s if deadline is None else deadline - time.monotonic()
        if not pending.replies:
            self._check(pending)
            future: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(max(0.0, left_s), _wake, future)
            pending.wake = lambda: _wake(future)
            try:
                await future
            finally:
                pending.wake = None
                timer.cancel()
        if not pending.replies:
            self._check(pending)
            raise too_late(call, limit_s)
        return pending.take()

    def _check(self, pending: Pending) -> None:
        if pending.connection != self._losses():
            raise _link.lost(self.endpoint)

    def _losses(self) -> int:
        return self._watch.losses if self._watch is not None else 0

    def _wake_all(self) -> None:
        """The connection broke: whoever waits on it gets to know, after its last words."""
        self._receive()
        for pending in self._exchange.abandon_all():
            if pending.wake is not None:
                pending.wake()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
