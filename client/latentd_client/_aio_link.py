"""One connection of an event loop to a daemon: its socket, its exchange, and who waits."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import zmq

from latentd_client import _link, _wire
from latentd_client._exchange import Exchange
from latentd_client._handshake import check_listener, no_hello
from latentd_client._meeting import Meeting
from latentd_client._request import Call, Pending, Reply, too_late
from latentd_client._watch import Watch
from latentd_client._weakly import weakly
from latentd_client._wire import EVENTS, NOBLOCK, POLLIN

if TYPE_CHECKING:
    from latentd_client.keys import CurveKeys
    from latentd_client.results import DaemonInfo

FAREWELL_MS = 100
"""What the end of a session has to leave, where nobody waits for the answer."""
RETRY_S = 0.002  # between two attempts to send


class AsyncLink:
    """A connection of the event loop that runs now, and the requests in flight on it. Neither the
    loop nor the watch keep it alive."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        """Connect. Raises ConnectionLost."""
        self.endpoint = endpoint
        self.keys = keys
        self.exchange = Exchange()
        self.loop = asyncio.get_running_loop()
        self._watch: Watch | None = None
        self._session = ""  # set by watch
        self._context = zmq.Context()
        sock = self.socket = _wire.make_socket(self._context, keys)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            sock.setsockopt(option, 0)
        self._meeting = Meeting(sock, endpoint, keys is not None)
        try:
            _wire.connect(sock, endpoint)
            self.loop.add_reader(int(sock.getsockopt(zmq.FD)), weakly(self.receive))
        except BaseException:
            self.close()
            raise

    async def shake_hands(self, timeout_s: float) -> None:
        """Wait until the daemon lets this client in. Raises ConnectionLost,
        RequestRejected("denied")."""
        deadline = self.loop.time() + timeout_s
        while not self._meeting.look():
            if self.loop.time() >= deadline:
                raise no_hello(self.endpoint, timeout_s)
            await asyncio.sleep(RETRY_S)

    def reconnect(self, timeout_s: float) -> None:
        """See Wire.reconnect. libzmq does it; what keeps it from that is raised once."""
        check_listener(self.endpoint)
        if self._watch is not None and (fault := self._watch.take_fault()) is not None:
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)
            raise fault
        self._wake_all()  # unless the loop has come to it

    def watch(self, info: DaemonInfo, session: str) -> None:
        """Keep to what the daemon has told; renew the session's lease, and notice when the
        connection breaks."""
        self.exchange.heed(info)
        loop, renew, wake_all = self.loop, weakly(self._renew), weakly(self._wake_all)
        self._session = session
        self._watch = Watch(
            self._meeting, info.control, self.keys, session, info.lease_s,
            lambda: loop.call_soon_threadsafe(renew),
            lambda: loop.call_soon_threadsafe(wake_all),
        )  # fmt: skip

    def follow(self, info: DaemonInfo, session: str) -> None:
        """The same of another session, from now on."""
        self._session = session
        self.exchange.heed(info)
        if self._watch is not None:
            self._watch.follow(info.control, session, info.lease_s)

    def is_here(self) -> bool:
        """Whether the event loop that runs now is the link's own."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:  # none runs: something is being collected
            return False

    def losses(self) -> int:
        """How often the connection broke."""
        return self._watch.losses if self._watch is not None else 0

    async def perform(self, call: Call, limit_s: float) -> Reply | None:
        """Send a call and wait for its first reply (None when none is expected). Raises
        RequestRejected, DeadlineExceeded, ConnectionLost, ProtocolError."""
        pending, frames = self.exchange.start(call)
        pending.connection = self.losses()
        deadline = time.monotonic() + limit_s
        try:
            while not self._send(frames):  # not connected (yet, or any more), or its queue is full
                if not call.expect:
                    return None
                self._check(pending)
                if time.monotonic() >= deadline:
                    raise too_late(call, limit_s)
                await asyncio.sleep(RETRY_S)
            return await self.wait(pending, limit_s, deadline) if call.expect else None
        except BaseException:
            if not call.is_kept:
                self.exchange.abandon(pending)
            raise

    async def wait(self, pending: Pending, limit_s: float, deadline: float | None = None) -> Reply:
        """The next reply of a request. Raises like `perform`."""
        left_s = limit_s if deadline is None else deadline - time.monotonic()
        if not pending.replies:
            self._check(pending)
            future: asyncio.Future[None] = self.loop.create_future()
            timer = self.loop.call_later(max(0.0, left_s), _wake, future)
            pending.wake = lambda: _wake(future)
            try:
                await future
            finally:
                pending.wake = None
                timer.cancel()
        if not pending.replies:
            self._check(pending)
            raise too_late(pending.call, limit_s)
        return pending.take()

    def _send(self, frames: list[bytes | memoryview]) -> bool:
        if self.socket.closed or (self._watch is not None and self._watch.is_down):
            return False
        try:
            self.socket.send_multipart(frames, NOBLOCK)
        except zmq.Again:
            return False
        self.receive()  # sending may have eaten the edge that announced a message
        return True

    def receive(self) -> None:
        """Take all messages that are there; the descriptor of a socket is edge-triggered."""
        sock = self.socket
        while not sock.closed and int(sock.getsockopt(EVENTS)) & POLLIN:
            self.exchange.receive(sock.recv_multipart(NOBLOCK))

    def _check(self, pending: Pending) -> None:
        if pending.connection != self.losses() or self.socket.closed:
            raise _link.lost(self.endpoint)

    def _wake_all(self) -> None:
        """The connection broke: whoever waits on it gets to know, after its last words. Who has
        seen that before may wait on the next one already."""
        self.receive()
        self.exchange.abandon_all(but=self.losses())

    def _renew(self) -> None:
        """Renew the lease here; its reply is skipped when it comes."""
        self.send_now(Call("ping", {"session": self._session}, expect=False))

    def send_now(self, call: Call) -> None:
        """Send what nobody waits for, if that goes now."""
        self._send(self.exchange.start(call)[1])

    def close(self) -> None:
        """Close the connection, end the watch and wake who waits; again is harmless."""
        if self.socket.closed:
            return
        if self._watch is not None:
            self._watch.stop()
        if self.loop.is_closed():
            return self._close_socket()
        self.loop.remove_reader(int(self.socket.getsockopt(zmq.FD)))
        self._close_socket()
        self.exchange.abandon_all()

    def leave(self) -> None:
        """Close the connection when the event loop has ended, without waiting for the watch."""
        if self._watch is None:
            self._close_socket()
        else:
            self._watch.leave(self._close_socket)

    def _close_socket(self) -> None:
        self._meeting.close()
        self.socket.close(FAREWELL_MS)
        self._context.term()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
