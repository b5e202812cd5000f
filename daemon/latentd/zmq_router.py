"""A `Router` over libzmq, for tcp with CURVE."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import zmq

from latentd.credentials import Credentials
from latentd.parking import size_of
from latentd.routing import SEND_QUEUE, SPARE_S, Frames, Message, Sent

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container, Sequence

EVENTS, POLLIN, RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
"""Plain ints: zmq's enums cost a microsecond for each `&` and `|`."""
LARGE_BYTES = 1 << 16
"""Messages from here on are tracked until they have left the process."""
MAX_QUEUED_BYTES = 64 << 20
"""Of those on their way to one peer: libzmq counts messages only."""
MAX_KNOWN = 4096
"""Peers whose addresses are known: libzmq does not tell that one has gone."""
KEY_BYTES = 40
"""Of a public key as it is told."""
NO_KEY = "?" * KEY_BYTES


def make_router(context: zmq.Context[zmq.Socket[bytes]], max_frame_bytes: int) -> zmq.Socket[bytes]:
    """A ROUTER that tells when a peer is full or gone."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    router.setsockopt(zmq.LINGER, 0)
    return router


def serve_at(router: zmq.Socket[bytes], listening: socket.socket, endpoint: str) -> None:
    """Serve who connects to `listening`, which is libzmq's from now on and its endpoint."""
    router.setsockopt(zmq.USE_FD, listening.detach())
    router.bind(endpoint)


class ZmqRouter:
    """A `Router` over a ROUTER of libzmq. A peer's key is part of its name: anybody may choose the
    routing id of one who has gone."""

    def __init__(self, router: zmq.Socket[bytes], max_frames: int) -> None:
        self.spare_s = SPARE_S  # connections come in on libzmq's own thread
        self._socket = router
        self._max_frames = max_frames
        self._send = super(zmq.Socket, router).send  # without the wrapper's own half microsecond
        self._queued: dict[bytes, list[tuple[zmq.MessageTracker, int]]] = {}  # and their bytes
        self._known: dict[bytes, Credentials] = {}
        self._is_ready = False  # the next receive need not ask
        self._wakee: socket.socket | None = None
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)

    def receive(self) -> Message | None:
        """See Router.receive."""
        router = self._socket
        if self._is_ready:
            self._is_ready = False
        elif not int(router.getsockopt(EVENTS)) & POLLIN:
            return None
        peer = self._meet()
        frames = [router.recv(NOBLOCK)]
        count = 1
        while router.getsockopt(RCVMORE):
            frame = router.recv(NOBLOCK)
            count += 1
            if count <= self._max_frames:
                frames.append(frame)
        return peer, frames, count

    def _meet(self) -> bytes:
        """The name of who has sent the next message, which begins; its address is noted."""
        frame = self._socket.recv(NOBLOCK, copy=False)
        assert isinstance(frame, zmq.Frame)
        key, address = NO_KEY, ""
        with contextlib.suppress(zmq.ZMQError):  # the handshake told both
            key, address = str(frame.get("User-Id")), str(frame.get("Peer-Address"))
        peer = frame.bytes + key.encode()
        if peer not in self._known:
            self._known[peer] = Credentials(key=key, address=address)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return peer

    def rest(self, peer: bytes, seconds: float) -> None:
        """See Router.rest: libzmq takes the peers in turn."""

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """See Router.try_send."""
        if len(frames) > 1 or len(frames[0]) >= LARGE_BYTES:
            return self._try_send_large(peer, frames)
        return self._try_send(peer, frames)

    def _try_send_large(self, peer: bytes, frames: Frames) -> Sent:
        """The same where less than MAX_QUEUED_BYTES are on their way to that peer already."""
        size = size_of(frames)
        if size < LARGE_BYTES:
            return self._try_send(peer, frames)
        queued = self._queued_to(peer)
        if queued and size + sum(size for _, size in queued) > MAX_QUEUED_BYTES:
            return Sent.FULL
        tracked = [zmq.Frame(bytes(frame), track=True, copy_threshold=0) for frame in frames]
        outcome = self._try_send(peer, tracked)
        if outcome is Sent.YES:
            trackers = [frame.tracker for frame in tracked]
            queued.append((zmq.MessageTracker(*trackers), size))
            self._queued[peer] = queued
        return outcome

    def _queued_to(self, peer: bytes) -> list[tuple[zmq.MessageTracker, int]]:
        """What is still on its way to a peer."""
        queued = [(sent, size) for sent, size in self._queued.pop(peer, ()) if not sent.done]
        if queued:
            self._queued[peer] = queued
        return queued

    def _try_send(self, peer: bytes, frames: Sequence[bytes | memoryview | zmq.Frame]) -> Sent:
        try:
            send = self._send
            where = peer[:-KEY_BYTES]
            send(where, NOBLOCK_MORE)  # the only send that can fail: a message is taken whole
            for frame in frames[:-1]:
                send(frame, NOBLOCK_MORE)
            send(frames[-1], NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.DEAD
        return Sent.YES

    def is_alone(self) -> bool:
        """See Router.is_alone: libzmq does not tell."""
        return False

    def look(self) -> bool:
        """See Router.look."""
        if int(self._socket.getsockopt(EVENTS)) & POLLIN:
            self._is_ready = True
        return self._is_ready

    def watch(self, wakee: socket.socket) -> None:
        """See Router.watch."""
        self._wakee = wakee
        self._poller.register(wakee, zmq.POLLIN)

    def sleep(self, timeout_ms: int) -> None:
        """See Router.sleep."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._wakee is not None and self._wakee.fileno() in ready:
            self._wakee.recv(4096)

    def has_room(self, peer: bytes) -> bool:
        """See Router.has_room: `try_send` tells."""
        return True

    def who(self, peer: bytes) -> Credentials:
        """See Router.who."""
        return self._known.get(peer) or Credentials(key=peer[-KEY_BYTES:].decode())

    def tick(self, now: float, in_use: Callable[[], Container[bytes]]) -> None:
        """See Router.tick."""
        for peer in list(self._queued):  # of some of them nothing more will be sent
            self._queued_to(peer)

    def close(self, linger_ms: int) -> None:
        """See Router.close."""
        self._socket.close(linger_ms)
