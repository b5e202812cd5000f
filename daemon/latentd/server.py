"""The serving loop: one thread owns the data socket and the engine.

A turn: 1. take all ready messages, admit each alone; 2. one engine run for all of them; 3. send
what completed; 4. look after leases, deadlines, parked replies, the watchdog; 5. with nothing to
do, poll for `spin_us` after the last message, then block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from latentd import requests
from latentd.completions import complete
from latentd.control import Control
from latentd.endpoint import Binding
from latentd.operations import DeviceFault
from latentd.replies import Outbox
from latentd.runs import OpenRun, StreamRun
from latentd.sessions import Sessions
from latentd.work import ServerOptions, Work
from latentd_client import protocol
from latentd_client.errors import LatentdError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.operations import EngineProtocol

__all__ = ["Server", "ServerOptions"]

MAX_MESSAGES = 256
"""Messages taken in one turn, so that a flood does not keep the engine from running."""
SEND_QUEUE = 128
"""Replies that a peer's queue holds before its streams park."""
TICK_S = 0.05
"""Between two looks at leases and deadlines while there is work."""
IDLE_TICK_S = 0.25
"""The same when idle (four wake-ups a second)."""
RETRY_S = 0.002
"""Between two attempts to send to a full peer."""
FLUSH_MS = 300
"""Longest wait for the last replies to leave."""

EVENTS, POLLIN, RCVMORE, NOBLOCK = (
    int(value) for value in (zmq.EVENTS, zmq.POLLIN, zmq.RCVMORE, zmq.NOBLOCK)
)
"""Plain ints: zmq's enums cost a microsecond for each `&` and `|`."""

log = logging.getLogger(__name__)


class Server:
    """Serves one engine. `bind`, then `serve` on the thread that owns the engine."""

    def __init__(
        self, engine: EngineProtocol, options: ServerOptions,
        on_tick: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_tick` is called on the engine thread a few times a second (the watchdog)."""
        self._engine = engine
        self._options = options
        self._on_tick = on_tick
        self._posts: deque[Callable[[], None]] = deque()
        self._stop_at: float | None = None
        self._drain_s = 30.0
        self._tick_at = 0.0
        self._retry_at = 0.0
        self._waker: socket.socket | None = None
        self._bindings: list[Binding] = []
        self._control: Control | None = None

    @property
    def endpoint(self) -> str:
        """Where clients connect, once bound."""
        return self._bindings[0].endpoint

    @property
    def control_endpoint(self) -> str:
        """Where the control socket is, once bound."""
        return self._bindings[1].endpoint

    def bind(self) -> None:
        """Bind both sockets. Raises EndpointError."""
        self._context = zmq.Context()
        self._router = self._make_router()
        self._control_router = self._make_router()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        try:
            self._bindings.append(Binding(self._router, self._options.endpoint))
            control = self._options.control_endpoint or protocol.control_endpoint(self.endpoint)
            self._bindings.append(Binding(self._control_router, control))
        except BaseException:
            self._close(0)
            raise
        sessions = Sessions(self._options.lease_s, self._options.grace_s)
        self._outbox = Outbox(self._router)
        self._work = Work(
            self._engine, self._options, sessions, self._outbox, self.control_endpoint
        )
        self._control = Control(
            self._control_router, sessions, self._ask_stats, self._post_cancel, self._drain
        )
        self._control.start()

    def _make_router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or dead peer is told, not dropped
        router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        router.setsockopt(zmq.MAXMSGSIZE, self._options.max_frame_bytes)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, int(self._options.endpoint.startswith("tcp://[")))
        return router

    def stop(self, drain_s: float) -> None:
        """Refuse new work from now on and leave `serve` when the running work is done, after
        `drain_s` at the latest. Safe on any thread and in a signal handler."""
        stop_at = time.monotonic() + drain_s
        self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
        self._wake()

    def abort(self) -> None:
        """Leave `serve` at once; who still waits is told `draining`."""
        self.stop(0.0)

    def serve(self) -> None:
        """Serve until stopped. Raises DeviceFault after every waiting client was told."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakee, zmq.POLLIN)
        spin_s = self._options.spin_us * 1e-6
        engine, work = self._engine, self._work
        last_message = 0.0
        try:
            while True:
                now = work.now = time.monotonic()
                if self._take():
                    last_message = now
                if engine.has_work:
                    for event in engine.run():
                        complete(work, event)
                if now >= self._tick_at or self._posts:
                    self._tick(now)
                if now >= self._retry_at and (self._outbox.has_parked or work.undelivered):
                    self._retry(now)
                if self._stop_at is not None and self._is_done(self._stop_at):
                    return
                if not engine.has_work and not self._spin(last_message + spin_s):
                    self._block(poller)
        except DeviceFault as fault:
            self._tell_fault(str(fault))
            raise
        finally:
            self._outbox.flush()
            self._close(FLUSH_MS)

    def _take(self) -> int:
        """Take the messages that are ready and admit each; returns how many."""
        router, work, limit = self._router, self._work, self._options.max_frames
        for count in range(MAX_MESSAGES):
            if not int(router.getsockopt(EVENTS)) & POLLIN:
                return count
            peer = router.recv(NOBLOCK)
            frames: list[bytes] = []
            num_frames = 0
            while router.getsockopt(RCVMORE):
                frame = router.recv(NOBLOCK)
                num_frames += 1
                if num_frames <= limit:
                    frames.append(frame)
            requests.handle(work, peer, frames, num_frames)
        return MAX_MESSAGES

    def _spin(self, until: float) -> bool:
        """Poll until something is to be done (true) or the time is over."""
        get_events = self._router.getsockopt
        while time.monotonic() < until:
            if int(get_events(EVENTS)) & POLLIN or self._posts:
                return True
            os.sched_yield()
        return False

    def _block(self, poller: zmq.Poller) -> None:
        """Sleep until a message, a wake-up or the next tick."""
        wait_s = self._tick_at - time.monotonic()
        if self._outbox.has_parked or self._work.undelivered:
            wait_s = min(wait_s, RETRY_S)
        if wait_s <= 0 or self._posts:
            return
        if self._wakee.fileno() in dict(poller.poll(int(wait_s * 1000) + 1)):
            self._wakee.recv(4096)

    def _retry(self, now: float) -> None:
        """Try again what full peers could not take."""
        self._retry_at = now + RETRY_S
        self._outbox.flush()
        for run in list(self._work.undelivered):
            self._work.deliver(run)

    def _tick(self, now: float) -> None:
        """What is due now and then."""
        work = self._work
        while self._posts:
            self._posts.popleft()()
        if now < self._tick_at:
            return
        self._tick_at = now + (TICK_S if work.runs or work.undelivered else IDLE_TICK_S)
        for late in [run for run in work.deadlines if run.expires_at <= now]:
            del work.deadlines[late]
            late.is_late = True
            work.engine.cancel(late.request)
        lost, ended = work.sessions.overdue(now)
        for session in lost:
            work.stop_streams(session)
        for session in ended:
            log.info("a session was not renewed for %g s: its slots are freed",
                     work.sessions.lease_s + work.sessions.grace_s)  # fmt: skip
            work.end_session(session)
        work.sessions.forget_old(now)
        if self._on_tick is not None:
            self._on_tick()

    def _is_done(self, stop_at: float) -> bool:
        """While stopping: whether nothing runs any more or the time is over."""
        work = self._work
        if not work.is_draining:
            work.is_draining = True
            self._set_state("draining")
        if not work.runs and not work.undelivered and not self._outbox.has_parked:
            return True
        if time.monotonic() < stop_at:
            return False
        for run in list(work.runs.values()):
            if isinstance(run, OpenRun | StreamRun):
                self._engine.cancel(run.request, "draining")
        for _ in range(4):  # what is launched commits, what was cancelled says so
            for event in self._engine.run() if self._engine.has_work else ():
                complete(work, event)
        for run in list(work.runs.values()):
            work.refuse(run, RequestRejected("draining", "the daemon stops"))
        return True

    def _tell_fault(self, text: str) -> None:
        """Answer everybody who waits, and what lies unread in the socket."""
        work = self._work
        work.fault = f"the device failed, the daemon ends and will be restarted: {text}"
        self._set_state("fault")
        for run in list(work.runs.values()):
            work.refuse(run, RequestRejected("device_fault", work.fault))
        work.runs.clear()
        with contextlib.suppress(LatentdError, zmq.ZMQError):
            self._take()

    def _set_state(self, state: str) -> None:
        """What health tells from now on."""
        if self._control is not None:
            self._control.state = state

    def _ask_stats(self) -> None:
        self._post(self._publish_stats)

    def _post_cancel(self, token: str, request_id: int) -> None:
        def cancel() -> None:
            with contextlib.suppress(RequestRejected):
                session = self._work.sessions.renew(token, self._work.now)
                self._work.cancel(session, request_id)

        self._post(cancel)

    def _drain(self, drain_s: float | None) -> None:
        self.stop(self._drain_s if drain_s is None else drain_s)

    def _post(self, action: Callable[[], None]) -> None:
        """Have the engine thread do something in its next turn."""
        self._posts.append(action)
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
                self._waker.send(b"x")

    def _publish_stats(self) -> None:
        """Give the control thread fresh figures."""
        work = self._work
        server = {
            "sessions": len(work.sessions),
            "runs": len(work.runs),
            "parked_streams": len(work.undelivered),
            **self._outbox.counters,
        }
        stats = {str(key): _plain(value) for key, value in self._engine.stats().items()}
        if self._control is not None:
            self._control.publish({**stats, "server": server})

    def _close(self, linger_ms: int) -> None:
        """Let the last replies leave, then take everything down; the paths go first."""
        for binding in self._bindings:
            binding.release()
        if self._control is not None:
            self._control.stop()
        self._router.close(linger_ms)
        self._control_router.close(linger_ms)
        self._context.term()
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()
            self._wakee.close()


def _plain(value: object) -> object:
    """Maps with text keys, as the wire wants them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
