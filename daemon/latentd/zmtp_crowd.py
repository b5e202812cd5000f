"""Who is connected to the daemon's own ROUTER: peers come, hold something, and go.

It moves no messages. What all peers cost together is bounded here: the bytes that are held for them
(`Holdings`), and their number (`_make_room`).
"""

from __future__ import annotations

import select
from itertools import islice
from typing import TYPE_CHECKING, Final

from latentd.rarely import Rarely
from latentd.zmtp_door import ACCEPTS, Door
from latentd.zmtp_holdings import PROGRESS_S, Holdings
from latentd.zmtp_peer import ZmtpPeer
from latentd_client import zmtp

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Container

    from latentd.access import Access

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT


class Crowd:
    """The peers, by name (the oldest first) and by descriptor, and the epoll that watches them."""

    def __init__(
        self, listening: socket.socket, limits: tuple[int, int, int], access: Access
    ) -> None:
        """They come in at `listening`; `limits` are those of a FrameReader; `access` says who may
        come, and who has to go when that is changed."""
        self.by_name: dict[bytes, ZmtpPeer] = {}
        self.by_fd: dict[int, ZmtpPeer] = {}
        self.epoll = select.epoll()
        self._limits = limits
        self._access, self._access_version = access, access.version
        self._door = Door(self.epoll, listening)
        self._holdings = Holdings()
        self._num_accepted = 0
        self._excess, self._strangers = Rarely(), Rarely()

    def is_door(self, fd: int) -> bool:
        """Whether that is where connections come in."""
        return fd == self._door.fileno()

    def let_in(self, spare_s: float) -> None:
        """Make peers of connections that wait, for about so long."""
        for sock in self._door.take(len(self.by_name), spare_s):
            self._welcome(sock)

    def close_door(self) -> None:
        """Let connections wait."""
        self._door.pause()

    def open_door(self) -> None:
        """Look at connections that wait."""
        self._door.resume()

    def _welcome(self, sock: socket.socket) -> None:
        self._num_accepted += 1
        name = self._num_accepted.to_bytes(8, "big")  # never the same again
        peer = ZmtpPeer(sock, name, zmtp.FrameReader(*self._limits), self._holdings.now)
        if peer.is_lost:  # it went before its turn came
            peer.close()
            return
        if not self._access.admits(peer.who):
            peer.refuse()
        self.by_name[name] = self.by_fd[sock.fileno()] = peer
        self._holdings.note(peer)
        peer.mask = IN
        self.epoll.register(sock, IN)

    def note(self, peer: ZmtpPeer) -> None:
        """Watch a peer for what it needs now, and note what it holds; who holds too much goes."""
        mask = (0 if peer.is_paused or peer.is_resting else IN) | (OUT if peer.has_queue else 0)
        if mask != peer.mask:
            peer.mask = mask
            self.epoll.modify(peer.socket, mask)
        self._holdings.note(peer)
        while largest := self._holdings.excess():
            self._excess.warn(
                "connections hold too much (unfinished messages, unread replies): "
                "one with %d bytes is closed", largest.held_bytes,
            )  # fmt: skip
            self.drop(largest)

    def drop(self, peer: ZmtpPeer) -> None:
        """Let go of a peer."""
        if self.by_name.pop(peer.name, None) is None:
            return
        del self.by_fd[peer.socket.fileno()]
        self._holdings.forget(peer)
        peer.is_lost = True
        if peer.fault:
            self._strangers.warn("a connection was refused: the peer %s", peer.fault)
        peer.close()  # which takes it out of epoll too

    def _turn_out(self) -> None:
        """Close the connections of those who may not connect any more."""
        self._access_version = self._access.version
        for peer in list(self.by_name.values()):
            if not self._access.admits(peer.who):
                self.drop(peer)

    def tick(self, now: float, in_use: Callable[[], Container[bytes]]) -> None:
        """See Router.tick."""
        if self._access_version != self._access.version:
            self._turn_out()
        for peer in self._holdings.tick(now):
            self.drop(peer)
        if self._door.is_shut:
            self._make_room(in_use())
            self._door.open()

    def _make_room(self, in_use: Container[bytes]) -> None:
        """Close the oldest connections that no session uses and that had their time to begin one.
        Nobody is closed for being idle as long as there is room: an idle peer costs a descriptor
        and nothing else."""
        before = self._holdings.now - PROGRESS_S
        peers = self.by_name.values()
        idle = (p for p in peers if p.came_at < before and p.name not in in_use)
        for peer in list(islice(idle, ACCEPTS)):
            self.drop(peer)

    def close(self) -> None:
        """Let go of everybody."""
        for peer in list(self.by_name.values()):
            self.drop(peer)
        self._door.close()
        self.epoll.close()
