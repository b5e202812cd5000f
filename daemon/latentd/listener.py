"""The daemon's sockets: bound, received from, waited on. It does not look into messages."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import zmq

from latentd.control import MAX_REQUEST_BYTES
from latentd.endpoint import Binding, EndpointError
from latentd.pulse import Pulse
from latentd.zmq_router import ZmqRouter, make_router, serve_at
from latentd.zmtp_router import ZmtpRouter
from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from latentd.access import Access
    from latentd.curve import Doorman
    from latentd.options import ServerOptions
    from latentd.routing import Message, Router
    from latentd_client.keys import KeyPair


class Listener:
    """The data and the control socket. `router` is the engine thread's, `control_router` the
    control thread's; `wake` may be called on any thread and in a signal handler. `pulse` is there
    when the data socket is of libzmq (tcp with CURVE) and the engine may poll."""

    def __init__(
        self, options: ServerOptions, access: Access,
        handed_over: Mapping[str, socket.socket] | None = None,
    ) -> None:  # fmt: skip
        """Bind both, but for those of `handed_over`, which listen already. Raises EndpointError."""
        self._access = access
        self._doorman: Doorman | None = None  # once there is a socket to be guarded
        self._handed_over = handed_over or {}
        self._context = zmq.Context()
        self._bindings: list[Binding] = []
        self.pulse: Pulse | None = None
        self._routers: list[Router] = []
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        try:
            self.router = self._bind(options.endpoint, options.max_frame_bytes, options.max_frames)
            self.control_router = self._bind_control(options)
            if options.spin_us and isinstance(self.router, ZmqRouter):
                self.pulse = Pulse(self._context)
        except BaseException:
            self.release()
            self.close(0)
            raise
        self.router.watch(self._wakee)
        self._spin_s = options.spin_us * 1e-6
        self._spin_until = 0.0
        self._is_fresh = False  # a message was received since the last wait

    def _bind_control(self, options: ServerOptions) -> Router:
        """The control socket: beside the data socket, if nobody says otherwise; where the system
        has chosen that one's port the next may be taken, and then it chooses another."""
        beside = protocol.control_endpoint(self.endpoint)
        anywhere = protocol.control_endpoint(options.endpoint)
        try:
            return self._bind(options.control_endpoint or beside, MAX_REQUEST_BYTES, 1)
        except EndpointError:
            if options.control_endpoint or anywhere == beside:
                raise
        return self._bind(anywhere, MAX_REQUEST_BYTES, 1)

    def _bind(self, endpoint: str, max_frame_bytes: int, max_frames: int) -> Router:
        """A socket that listens: ours, but for tcp with CURVE, which is of libzmq."""
        pair = self._access.pair if endpoint.startswith("tcp://") else None
        binding = Binding(endpoint, self._handed_over.get(endpoint), is_guarded=pair is not None)
        self._bindings.append(binding)
        if pair is None:
            ours = ZmtpRouter(binding.socket, max_frame_bytes, max_frames, self._access)
            self._routers.append(ours)
            return ours
        theirs = make_router(self._context, max_frame_bytes)
        self._routers.append(router := ZmqRouter(theirs, max_frames))
        self._doorman = self._doorman or _hire_doorman(self._context, pair, self._access)
        self._doorman.guard(theirs)
        serve_at(theirs, binding.socket, binding.endpoint)
        return router

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._bindings[0].endpoint

    @property
    def control_endpoint(self) -> str:
        """Where the control socket is."""
        return self._bindings[1].endpoint

    def receive(self) -> Message | None:
        """The next message that is there, or None."""
        message = self.router.receive()
        if message is not None:
            self._is_fresh = True
        return message

    def wait(self, until: float) -> None:
        """Wait for a message, a wake-up or a time: polling for `spin_us` after the last message was
        dealt with (others get the processor if they want it, as the thread of libzmq where that
        serves), then asleep."""
        if self._is_fresh:
            self._is_fresh = False
            self._spin_until = time.monotonic() + self._spin_s
        if self.poll(self._spin_until):
            return
        now = time.monotonic()
        if until > now:
            self.router.sleep(int((until - now) * 1000) + 1)

    def poll(self, until: float) -> bool:
        """Poll until a time; whether something has happened."""
        look, clock, let_others = self.router.look, time.monotonic, os.sched_yield
        while clock() < until:
            if look():
                return True
            let_others()
        return False

    def wake(self) -> None:
        """End a `wait`, now or the next."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"x")

    def is_alone(self) -> bool:
        """Whether nobody is connected any more, as far as that can be told."""
        return all(router.is_alone() for router in self._routers)

    def release(self) -> None:
        """Take the paths away: nobody new connects."""
        for binding in self._bindings:
            binding.release()

    def close(self, linger_ms: int) -> None:
        """Close everything; what was sent has `linger_ms` to leave."""
        for router in self._routers:
            router.close(linger_ms)
        if self.pulse is not None:
            self.pulse.close()
        if self._doorman is not None:
            self._doorman.close()
        self._context.term()
        self._waker.close()
        self._wakee.close()


def _hire_doorman(
    context: zmq.Context[zmq.Socket[bytes]], pair: KeyPair, access: Access
) -> Doorman:
    from latentd.curve import Doorman  # needs asyncio, and few need it

    return Doorman(context, pair, access)
