"""Who is not read for a moment, so that one who decodes does not wait for floods.

It knows when a rest is over; the router knows what comes then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from latentd.zmtp_crowd import Crowd
    from latentd.zmtp_peer import ZmtpPeer

FRAMES_S: Final = 0.002
"""The rest of a peer that has sent a turn's frames and no message."""
DOOR_S: Final = 0.001
"""How long those who connect wait behind others who did: each costs more than a message."""


class Rests:
    """Peers that rest (`is_resting`), and the door when nobody is let in. `are_there`: somebody's
    may be over."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._until: dict[ZmtpPeer, float] = {}
        self._door_until: float | None = None
        self.are_there = False

    def begin(self, peer: ZmtpPeer, seconds: float) -> None:
        """A peer rests from now on."""
        peer.is_resting = self.are_there = True
        self._until[peer] = time.monotonic() + seconds

    def close_door(self) -> None:
        """Nobody is let in from now on."""
        self._crowd.close_door()
        self._door_until = time.monotonic() + DOOR_S
        self.are_there = True

    def end(self, now: float) -> list[ZmtpPeer]:
        """Those whose rest is over by now; the door looks after itself."""
        awake = [peer for peer, until in self._until.items() if until <= now]
        for peer in awake:
            del self._until[peer]
            peer.is_resting = False
        if self._door_until is not None and self._door_until <= now:
            self._door_until = None
            self._crowd.open_door()
        self.are_there = bool(self._until) or self._door_until is not None
        return awake
