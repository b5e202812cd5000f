"""A `Router` on ipc and plain tcp without libzmq, on the thread that uses it.

libzmq hands every message to a thread of its own and back, which costs a step two wake-ups. This
one reads and writes the peers' sockets itself; DEALERs of libzmq notice no difference.

Whoever connects costs the daemon little, whatever it sends, and costs others nothing: a handshake
has 30 s and 4 KiB, a message a size (`FrameReader`) and 30 s for its next byte, a peer whose queue
of replies is full is not read until it takes them (`_settle`), all peers share one budget of bytes,
and when descriptors run short those give way who have no session (`Crowd`).
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from latentd.access import Access
from latentd.credentials import UNKNOWN
from latentd.routing import SPARE_S, Message, Sent
from latentd.zmtp_crowd import IN, OUT, Crowd
from latentd.zmtp_rests import FRAMES_S, Rests
from latentd_client import protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container

    from latentd.credentials import Credentials
    from latentd.routing import Frames
    from latentd.zmtp_peer import ZmtpPeer

CHUNK_BYTES: Final = 1 << 16
"""Read of a peer in one turn, and no more than a frame."""
BULK: Final = 16
"""Peers in the middle of a long message that are read in one turn: others have to wait for that."""
GONE: Final = select.EPOLLHUP | select.EPOLLERR


class ZmtpRouter:
    """Many peers on one listening socket. They are served in turn, a message each; a peer is read
    again when all of its messages were taken and there is room for its replies."""

    def __init__(
        self, listening: socket.socket, max_frame_bytes: int, max_frames: int,
        access: Access | None = None,
    ) -> None:  # fmt: skip
        """Serve who connects to `listening`, which is ours from now on. A message has at most one
        frame of `max_frame_bytes` beside its header; `access` says who may connect."""
        max_message_bytes = max_frame_bytes + protocol.MAX_HEADER_BYTES
        self.spare_s = SPARE_S
        limits = max_frame_bytes, max_frames, max_message_bytes
        crowd = self._crowd = Crowd(listening, limits, access or Access())
        self._peers, self._by_fd = crowd.by_name, crowd.by_fd
        self._poll = crowd.epoll.poll
        self._events: list[tuple[int, int]] = []  # seen by `look` and not dealt with
        self._wakee: socket.socket | None = None
        self._busy: dict[ZmtpPeer, None] = {}  # their next messages may be here
        self._bulk: dict[ZmtpPeer, None] = {}  # more of their long messages is here
        self._rests = Rests(crowd)
        self._ready: deque[Message] = deque()
        self._chunk = bytearray(min(CHUNK_BYTES, max_frame_bytes))

    def receive(self) -> Message | None:
        """See Router.receive."""
        if not self._ready:
            self._gather()
        return self._ready.popleft() if self._ready else None

    def _gather(self) -> None:
        """One message of every peer that has one."""
        if self._rests.are_there:
            self._end_rests(time.monotonic())
        if self._busy:
            busy, self._busy = self._busy, {}
            for peer in busy:
                if not peer.is_paused:
                    self._take(peer, peer.next())
        events, self._events = self._events or self._poll(0), []
        for fd, mask in events:
            if fd not in self._by_fd:
                self._other_event(fd)
                continue
            peer = self._by_fd[fd]
            if mask & OUT:
                peer.flush()
                self._settle(peer)
            if peer.is_paused:
                if mask & GONE:
                    self._crowd.drop(peer)
            elif mask & ~OUT and not peer.is_busy and not peer.is_lost:
                if peer.is_bulky:
                    self._bulk[peer] = None
                else:
                    self._take(peer, peer.read(self._chunk))
        if self._bulk:
            self._go_on()

    def _go_on(self) -> None:
        """Read the next pieces of some long messages; the other senders have their turn next."""
        for peer in list(islice(self._bulk, BULK)):
            self._bulk.pop(peer, None)
            if (
                not peer.is_paused and not peer.is_lost
            ):  # another's piece may have cost it its place
                self._take(peer, peer.read(self._chunk))

    def _take(self, peer: ZmtpPeer, message: list[bytes] | None) -> None:
        """Note a peer's message, and what became of the peer."""
        if message is not None:
            self._ready.append((peer.name, message, peer.count))
            if peer.was_plain:
                return  # nearly always
        elif peer.is_busy and not peer.is_lost:
            self.rest(peer.name, FRAMES_S)
            return
        self._settle(peer)

    def _settle(self, peer: ZmtpPeer) -> None:
        """Note what has become of a peer, after all but plain messages and replies that left."""
        if peer.is_lost:
            self._crowd.drop(peer)
            return
        peer.is_paused = peer.is_full
        peer.is_bulky = not peer.is_busy and peer.unfinished >= len(self._chunk)
        if peer.is_busy and not peer.is_paused and not peer.is_resting:
            self._busy[peer] = None
        self._crowd.note(peer)

    def rest(self, peer: bytes, seconds: float) -> None:
        """See Router.rest."""
        tired = self._peers.get(peer)
        if tired is not None and not tired.is_lost:
            self._rests.begin(tired, seconds)
            self._busy.pop(tired, None)
            self._settle(tired)

    def _end_rests(self, now: float) -> None:
        """Read those again whose rest is over."""
        for peer in self._rests.end(now):
            if peer.name in self._peers:
                self._settle(peer)

    def _other_event(self, fd: int) -> None:
        if self._crowd.is_door(fd):
            self._crowd.let_in(self.spare_s)
            self._rests.close_door()
        elif self._wakee is not None and fd == self._wakee.fileno():
            self._wakee.recv(4096)

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """See Router.try_send. A reply is never refused: who has too many of them asks no more."""
        to = self._peers.get(peer)
        if to is None:
            return Sent.DEAD
        if not to.send(frames):
            self._settle(to)
            if to.is_lost:
                return Sent.DEAD
        return Sent.YES

    def has_room(self, peer: bytes) -> bool:
        """See Router.has_room."""
        to = self._peers.get(peer)
        return to is None or to.has_room

    def who(self, peer: bytes) -> Credentials:
        """See Router.who."""
        to = self._peers.get(peer)
        return UNKNOWN if to is None else to.who

    def is_alone(self) -> bool:
        """See Router.is_alone."""
        return not self._peers

    def look(self) -> bool:
        """See Router.look."""
        if not self._events:
            self._events = self._poll(0)
        return bool(self._events or self._busy or self._ready)

    def watch(self, wakee: socket.socket) -> None:
        """See Router.watch."""
        self._wakee = wakee
        self._crowd.epoll.register(wakee, IN)

    def sleep(self, timeout_ms: int) -> None:
        """See Router.sleep. A message that was read before, of a peer that reads its replies again,
        brings no event of its own."""
        if self._rests.are_there:
            self._end_rests(math.inf)
        if not self._events and not self._busy:
            self._events = self._poll(timeout_ms / 1000)

    def tick(self, now: float, in_use: Callable[[], Container[bytes]]) -> None:
        """See Router.tick."""
        self._crowd.tick(now, in_use)

    def close(self, linger_ms: int) -> None:
        """See Router.close."""
        until = time.monotonic() + linger_ms / 1000
        while any(peer.has_queue for peer in self._peers.values()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            for fd, mask in self._poll(left_s):
                if mask & OUT and fd in self._by_fd:
                    self._by_fd[fd].flush()
                    self._settle(self._by_fd[fd])
        self._crowd.close()
