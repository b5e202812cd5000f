"""What peers make the daemon hold: messages that are not whole, replies that they do not read.

One budget for all connections. A single peer has its own bounds, far above what a client needs;
without this one a thousand peers could hold a thousand times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from latentd.zmtp_peer import ZmtpPeer

HELD_BYTES: Final = 512 << 20
"""Of all peers together: 128 clients may send prompts of a million tokens at the same time."""
PROGRESS_S: Final = 30.0
"""Within which hands have to be shaken, as with libzmq, and then a byte of an unfinished message
has to come. A slow sender is welcome: what drips costs no more than what is idle, and what it has
sent counts in the budget."""
MAX_TICK_S: Final = 1.0
"""What counts of the time between two ticks."""


@dataclass(eq=False, slots=True)
class _Holding:
    held_bytes: int
    unfinished: int
    changed_at: float
    waits_s: float = 0.0  # for the next byte of an unfinished message


class Holdings:
    """Who holds how much, and since when. `now` counts seconds in which the daemon looked: while it
    is stopped nobody is late."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ticked_at: float | None = None
        self._total = 0
        self._by_peer: dict[ZmtpPeer, _Holding] = {}

    def note(self, peer: ZmtpPeer) -> None:
        """Look at what a peer holds now."""
        held_bytes, unfinished = peer.held_bytes, peer.unfinished
        holding = self._by_peer.get(peer)
        if not held_bytes and not unfinished:
            if holding is not None:
                self.forget(peer)
            return
        if holding is None:
            holding = self._by_peer[peer] = _Holding(0, 0, self.now)
        if unfinished != holding.unfinished:
            holding.unfinished = unfinished
            holding.waits_s = 0.0
        if held_bytes != holding.held_bytes:
            self._total += held_bytes - holding.held_bytes
            holding.held_bytes = held_bytes
            holding.changed_at = self.now

    def forget(self, peer: ZmtpPeer) -> None:
        """A peer holds nothing any more."""
        holding = self._by_peer.pop(peer, None)
        if holding is not None:
            self._total -= holding.held_bytes

    def excess(self) -> ZmtpPeer | None:
        """Who has to go, if it is too much: the peer that holds most for longest. A client that
        sends its prompt, or reads its replies, is not it: what it holds changes all the time."""
        if self._total <= HELD_BYTES:
            return None

        def weight(peer: ZmtpPeer) -> tuple[float, int]:
            holding = self._by_peer[peer]
            return holding.held_bytes * (self.now - holding.changed_at), holding.held_bytes

        return max(self._by_peer, key=weight)

    def tick(self, now: float) -> list[ZmtpPeer]:
        """Let time pass; the peers whose unfinished messages do not go on. One that is not read
        (`is_paused`, `is_resting`) cannot help it."""
        passed_s = 0.0 if self._ticked_at is None else min(MAX_TICK_S, now - self._ticked_at)
        self._ticked_at = now
        self.now += passed_s
        late = []
        for peer, holding in self._by_peer.items():
            if not holding.unfinished or peer.is_paused or peer.is_resting:
                holding.waits_s = 0.0
                continue
            holding.waits_s += passed_s
            if holding.waits_s > PROGRESS_S:
                late.append(peer)
        return late
