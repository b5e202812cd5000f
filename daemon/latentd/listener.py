"""The daemon's sockets: bound, received from, waited on. It does not look into messages."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import zmq

from latentd.endpoint import Binding
from latentd.pulse import Pulse
from latentd_client import protocol

if TYPE_CHECKING:
    from latentd.work import ServerOptions

SEND_QUEUE = 128
"""Replies that a peer's queue holds before its streams park."""
EVENTS, POLLIN, RCVMORE, NOBLOCK = (
    int(value) for value in (zmq.EVENTS, zmq.POLLIN, zmq.RCVMORE, zmq.NOBLOCK)
)
"""Plain ints: zmq's enums cost a microsecond for each `&` and `|`."""


class Listener:
    """The data and the control socket. `router` is the engine thread's, `control_router` the
    control thread's; `wake` may be called on any thread and in a signal handler."""

    def __init__(self, options: ServerOptions) -> None:
        """Bind both. Raises EndpointError."""
        self._options = options
        self._context = zmq.Context()
        self.router = self._make_router()
        self.control_router = self._make_router()
        self.pulse: Pulse | None = None
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._bindings: list[Binding] = []
        try:
            self._bindings.append(Binding(self.router, options.endpoint))
            control = options.control_endpoint or protocol.control_endpoint(self.endpoint)
            self._bindings.append(Binding(self.control_router, control))
            if options.spin_us:
                self.pulse = Pulse(self._context)
        except BaseException:
            self.release()
            self.close(0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self.router, zmq.POLLIN)
        self._poller.register(self._wakee, zmq.POLLIN)
        self._spin_s = options.spin_us * 1e-6
        self._spin_until = 0.0
        self._is_fresh = False  # a message was received since the last wait
        self._is_ready = False  # the next receive need not ask

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._bindings[0].endpoint

    @property
    def control_endpoint(self) -> str:
        """Where the control socket is."""
        return self._bindings[1].endpoint

    def _make_router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or dead peer is told, not dropped
        router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        router.setsockopt(zmq.MAXMSGSIZE, self._options.max_frame_bytes)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, int(self._options.endpoint.startswith("tcp://[")))
        return router

    def receive(self) -> tuple[bytes, list[bytes], int] | None:
        """The next message that is there, or None: peer, frames, and their true number (those
        beyond `max_frames` are not kept)."""
        router = self.router
        if self._is_ready:
            self._is_ready = False
        elif not int(router.getsockopt(EVENTS)) & POLLIN:
            return None
        self._is_fresh = True
        peer = router.recv(NOBLOCK)
        frames = [router.recv(NOBLOCK)]
        count = 1
        while router.getsockopt(RCVMORE):
            frame = router.recv(NOBLOCK)
            count += 1
            if count <= self._options.max_frames:
                frames.append(frame)
        return peer, frames, count

    def wait(self, until: float) -> None:
        """Wait for a message, a wake-up or a time: polling for `spin_us` after the last message was
        dealt with (others get the processor if they want it: libzmq's own thread must run), then
        asleep."""
        if self._is_fresh:
            self._is_fresh = False
            self._spin_until = time.monotonic() + self._spin_s
        if self.poll(self._spin_until):
            return
        now = time.monotonic()
        if until <= now:
            return
        if self._wakee.fileno() in dict(self._poller.poll(int((until - now) * 1000) + 1)):
            self._wakee.recv(4096)

    def poll(self, until: float) -> bool:
        """Poll for a message until a time; whether one is there."""
        get_events, clock, let_others = self.router.getsockopt, time.monotonic, os.sched_yield
        while clock() < until:
            if int(get_events(EVENTS)) & POLLIN:
                self._is_ready = True
                return True
            let_others()
        return False

    def wake(self) -> None:
        """End a `wait`, now or the next."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"x")

    def release(self) -> None:
        """Take the paths away: nobody new connects."""
        for binding in self._bindings:
            binding.release()

    def close(self, linger_ms: int) -> None:
        """Close everything; what was sent has `linger_ms` to leave."""
        self.router.close(linger_ms)
        self.control_router.close(linger_ms)
        if self.pulse is not None:
            self.pulse.close()
        self._context.term()
        self._waker.close()
        self._wakee.close()
