"""Keeps the thread of libzmq awake while the engine waits for the device.

With CURVE libzmq sends and receives, on a thread of its own. During a step of 2 ms nothing wakes
it, its processor goes to sleep, and the reply pays for that: 56 us more over a step of 2300 us than
with a pulse every 50 us (a virtual machine with an H200). A short step needs none: the processor
waits that long by itself.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from typing import Final

import zmq

log = logging.getLogger(__name__)

EVERY_S: Final = 50e-6
EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
NOBLOCK: Final = int(zmq.NOBLOCK)


class Pulse:
    """A message to oneself through libzmq's thread, now and then, or nothing where there is no
    temporary folder for it. It belongs to the engine thread once made."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Make the way round: two sockets over a path that is gone once they are connected."""
        self._near, self._far = (context.socket(zmq.PAIR) for _ in range(2))
        self._due = 0.0
        for end in (self._near, self._far):
            end.setsockopt(zmq.LINGER, 0)
        try:
            with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
                self._far.bind(f"ipc://{folder}/pulse")
                self._near.connect(f"ipc://{folder}/pulse")
                self._near.send(b"")
                self._far.recv()
        except (OSError, zmq.ZMQError) as error:  # no such folder, or its path is too long
            log.info("libzmq's thread is not kept awake: %s", error)
            self._due = math.inf

    def beat(self) -> None:
        """Wake the thread, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY_S
        while int(self._far.getsockopt(EVENTS)) & POLLIN:
            self._far.recv(NOBLOCK)
        if int(self._near.getsockopt(EVENTS)) & POLLOUT:
            self._near.send(b"", NOBLOCK)

    def close(self) -> None:
        """Close both ends."""
        self._near.close()
        self._far.close()
