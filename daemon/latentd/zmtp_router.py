"""A `Router` on ipc without libzmq, on the thread that uses it.

libzmq hands every message to a thread of its own and back, which costs a step two wake-ups. This
one reads and writes the peers' sockets itself; DEALERs of libzmq notice no difference.
"""

from __future__ import annotations

import errno
import logging
import resource
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from latentd.routing import Message, Sent
from latentd.zmtp_peer import ZmtpPeer

if TYPE_CHECKING:
    from latentd.routing import Frames

HANDSHAKE_S: Final = 30.0
"""What a connection has to shake hands; libzmq gives the same."""
BACKLOG: Final = 128
"""Connections that the system keeps until they are taken."""
ACCEPTS: Final = 16
"""Connections taken in one turn, so that a flood of them does not keep a step waiting."""
RESERVE: Final = 64
"""Descriptors that peers leave to the rest of the process: libzmq, which serves the control socket,
aborts it where it gets none."""
WARN_S: Final = 60.0
CHUNK_BYTES: Final = 1 << 18
IN, OUT = select.EPOLLIN, select.EPOLLOUT

log = logging.getLogger(__name__)


class ZmtpRouter:
    """Many peers on one listening path. They are served in turn, a message each; a peer is read
    again when all of its messages were taken."""

    def __init__(self, max_frame_bytes: int, max_frames: int) -> None:
        self._limits = (max_frame_bytes, max_frames)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._poll = self._epoll.poll
        self._events: list[tuple[int, int]] = []  # seen by `look` and not dealt with
        self._wakee: socket.socket | None = None
        self._peers: dict[bytes, ZmtpPeer] = {}
        self._by_fd: dict[int, ZmtpPeer] = {}
        self._shaking: dict[ZmtpPeer, float] = {}  # until when they may
        self._busy: list[ZmtpPeer] = []  # their next messages may be here
        self._ready: deque[Message] = deque()
        self._num_accepted = 0
        self._is_deaf = False  # no descriptor is left for another peer
        self._silent_until = 0.0  # when to warn of that again
        self._chunk = bytearray(CHUNK_BYTES)

    def bind(self, endpoint: str) -> None:
        """Listen on an ipc endpoint. Raises OSError."""
        self._listener.bind(endpoint.removeprefix("ipc://"))
        self._listener.listen(BACKLOG)
        self._epoll.register(self._listener, IN)

    def receive(self) -> Message | None:
        """See Router.receive."""
        if not self._ready:
            self._gather()
        return self._ready.popleft() if self._ready else None

    def _gather(self) -> None:
        """One message of every peer that has one."""
        busy, self._busy = self._busy, []
        for peer in busy:
            self._take(peer, peer.next())
        events, self._events = self._events or self._poll(0), []
        for fd, mask in events:
            if fd not in self._by_fd:
                self._other_event(fd)
                continue
            peer = self._by_fd[fd]
            if mask & OUT:
                self._flush(peer)
            if mask & ~OUT and not peer.is_busy and not peer.is_lost:
                self._take(peer, peer.read(self._chunk))

    def _take(self, peer: ZmtpPeer, message: list[bytes] | None) -> None:
        """Note a peer's message, and what became of the peer."""
        if message is not None:
            self._ready.append((peer.name, message, peer.count))
        if peer.is_lost:
            self._drop(peer)
            return
        if peer.is_busy:
            self._busy.append(peer)
        if peer.has_queue:  # the answer to a heartbeat did not fit
            self._epoll.modify(peer.socket, IN | OUT)
        if self._shaking and peer.is_open:
            self._shaking.pop(peer, None)

    def _other_event(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif self._wakee is not None and fd == self._wakee.fileno():
            self._wakee.recv(4096)

    def _accept(self) -> None:
        """Take connections that wait; those that are left are there in the next turn."""
        for _ in range(ACCEPTS):
            if len(self._peers) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE:
                self._wait(f"{len(self._peers)} are connected")
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._wait(str(error))
                return
            sock.setblocking(False)
            self._num_accepted += 1
            name = self._num_accepted.to_bytes(8, "big")  # never the same again
            peer = ZmtpPeer(sock, name, *self._limits)
            if peer.is_lost:  # it went before its turn came
                peer.close()
                continue
            self._peers[name] = self._by_fd[sock.fileno()] = peer
            self._shaking[peer] = time.monotonic() + HANDSHAKE_S
            self._epoll.register(sock, IN)

    def _wait(self, why: str) -> None:
        """Take no connection until the next tick."""
        self._is_deaf = True
        self._epoll.modify(self._listener, 0)
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + WARN_S
            log.warning("clients have to wait: %s", why)

    def _drop(self, peer: ZmtpPeer) -> None:
        """Let go of a peer."""
        if self._peers.pop(peer.name, None) is not None:
            del self._by_fd[peer.socket.fileno()]
            self._shaking.pop(peer, None)
            peer.is_lost = True
            peer.close()  # which takes it out of epoll too

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """See Router.try_send."""
        to = self._peers.get(peer)
        if to is None:
            return Sent.DEAD
        had_queue = to.has_queue
        if not to.send(frames):
            return Sent.FULL
        if to.is_lost:
            self._drop(to)
            return Sent.DEAD
        if to.has_queue and not had_queue:
            self._epoll.modify(to.socket, IN | OUT)
        return Sent.YES

    def _flush(self, peer: ZmtpPeer) -> None:
        peer.flush()
        if peer.is_lost:
            self._drop(peer)
        elif not peer.has_queue:
            self._epoll.modify(peer.socket, IN)

    def look(self) -> bool:
        """See Router.look."""
        if not self._events:
            self._events = self._poll(0)
        return bool(self._events or self._busy or self._ready)

    def watch(self, wakee: socket.socket) -> None:
        """See Router.watch."""
        self._wakee = wakee
        self._epoll.register(wakee, IN)

    def sleep(self, timeout_ms: int) -> None:
        """See Router.sleep."""
        if not self._events:
            self._events = self._poll(timeout_ms / 1000)

    def tick(self, now: float) -> None:
        """Let go of who does not shake hands; listen again after a want of descriptors."""
        for peer in [peer for peer, until in self._shaking.items() if until < now]:
            self._drop(peer)
        if self._is_deaf:
            self._is_deaf = False
            self._epoll.modify(self._listener, IN)

    def close(self, linger_ms: int) -> None:
        """See Router.close."""
        until = time.monotonic() + linger_ms / 1000
        while any(peer.has_queue for peer in self._peers.values()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            for fd, mask in self._poll(left_s):
                if mask & OUT and fd in self._by_fd:
                    self._flush(self._by_fd[fd])
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._listener.close()
        self._epoll.close()
