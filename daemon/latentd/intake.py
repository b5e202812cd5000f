"""The messages of the data socket: taken and admitted, each alone, for as long as the engine's next
launch can wait for that."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from latentd import requests

if TYPE_CHECKING:
    from latentd.listener import Listener
    from latentd.work import Work

MAX_MESSAGES = 256
"""Messages taken in one turn, so that a flood does not keep the engine from running."""
FEW_MESSAGES = 64
"""The same in front of a launch that somebody's next token waits for."""
TAKE_S = 0.005
"""Time for messages in front of a launch: some take a thousand times as long as a step's."""
SPARE_SHARE = 0.25
"""Of the last launch's time: what may be spent in front of the next one on messages that give the
engine nothing to do, and on new connections. With nothing in flight nobody waits for them."""
REST_S = 0.001
"""How long a peer is not read whose messages have used that up."""
LEAVING_S = 0.01
"""Between two looks whether the last one has gone."""
DECODING_S = 0.01
"""From the last launch until nobody is taken to decode any more."""


class Intake:
    """Takes them on the engine thread."""

    def __init__(self, work: Work, listener: Listener) -> None:
        self._work = work
        self._listener = listener
        self._spare_s = TAKE_S
        self._decoding_until = 0.0

    def take(self, most: int = MAX_MESSAGES) -> None:
        """Take the messages that are ready and admit each. While somebody decodes, for a short
        time, at most one that moves pages, and few that give the engine nothing to do."""
        work, listener, now = self._work, self._listener, time.monotonic()
        until, spare_s = now + TAKE_S, self._spare_s
        for _ in range(most):
            message = listener.receive()
            if message is None:
                return
            num_runs, begin = len(work.runs), now
            requests.handle(work, *message)
            now = time.monotonic()
            if len(work.runs) == num_runs:
                spare_s -= now - begin
                if spare_s < 0 and now < self._decoding_until:
                    listener.router.rest(message[0], REST_S)
            if work.took_piece or now > until or spare_s < 0:
                work.took_piece = False
                if work.engine.has_work:
                    return

    def launched(self, begin: float, end: float) -> None:
        """A launch took that time: somebody decodes, and waits for the next one."""
        self._decoding_until = end + DECODING_S
        self._spare_s = self._listener.router.spare_s = min(TAKE_S, SPARE_SHARE * (end - begin))

    def say_last_words(self, seconds: float, to_newcomers: bool) -> None:
        """Tell those who still ask why they are refused: a client in the middle of its steps asks
        again at once. Where nobody new is told, that is over when all have gone."""
        until = time.monotonic() + seconds
        self._work.is_draining = True
        while (now := time.monotonic()) < until:
            with contextlib.suppress(Exception):  # nothing shall keep it from its end
                self.take()
            if not to_newcomers and self._listener.is_alone():
                return
            self._listener.wait(min(until, now + LEAVING_S))
