"""The background thread of a client: renews the lease, and notices a broken connection.

It lets the client's owner think for ten minutes: the daemon sees the renewals on its control socket
(on the data socket where that does not answer), while transport heartbeats stay inside libzmq.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

import zmq

from latentd_client._meeting import Meeting
from latentd_client.control import Control
from latentd_client.errors import LatentdError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client.keys import CurveKeys

log = logging.getLogger(__name__)


class Watch:
    """`losses` counts how often the connection of a socket of libzmq broke; `is_down` until it is
    made again: what is sent before may be taken and go nowhere."""

    def __init__(
        self, meeting: Meeting | None, control: str, keys: CurveKeys | None, session: str,
        lease_s: float, renew: Callable[[], object], on_change: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Watch the client's data connection, if it is one of libzmq (else who reads it sees the
        break). On the watching thread `renew` is called when the control socket does not answer: it
        sends a renewal on the data connection; and `on_change` when that connection broke."""
        self.losses = 0
        self.is_down = False
        self._meeting = meeting
        self._control = control
        self._keys = keys
        self._session = session
        self._every_s = lease_s / 3
        self._renew_on_data = renew
        self._on_change = on_change
        self._at_end: Callable[[], object] | None = None  # set by leave
        self._waker, self._wakee = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="latentd-watch", daemon=True)
        self._thread.start()

    def follow(self, control: str, session: str, lease_s: float) -> None:
        """Renew another session from the next time on."""
        self._control, self._session, self._every_s = control, session, lease_s / 3

    def _run(self) -> None:
        self._watch()
        if self._at_end is not None:
            self._release()
            self._at_end()

    def _watch(self) -> None:
        poller = zmq.Poller()
        meeting = self._meeting
        if meeting is not None:
            poller.register(meeting.monitor, zmq.POLLIN)
        poller.register(self._wakee, zmq.POLLIN)
        renew_at = time.monotonic() + self._every_s
        while True:
            left_ms = max(0.0, renew_at - time.monotonic()) * 1000
            ready = dict(poller.poll(int(left_ms) + 1))
            if self._wakee.fileno() in ready:
                return
            if meeting is not None and meeting.monitor in ready:
                self._changed(meeting.take())
            if time.monotonic() >= renew_at:
                self._renew()
                renew_at = time.monotonic() + self._every_s

    def _changed(self, event: int) -> None:
        if event != zmq.EVENT_DISCONNECTED:
            self.is_down &= event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            return
        self.is_down = True
        self.losses += 1
        if self._on_change is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._on_change()

    def take_fault(self) -> LatentdError | None:
        """Why the connection is not made again, once."""
        if self._meeting is None:
            return None
        fault, self._meeting.fault = self._meeting.fault, None
        return fault

    def _renew(self) -> None:
        """One renewal, on a connection of its own: once in 20 s that costs nothing. Others may hold
        all connections of the control socket; of the data socket the client has its own."""
        try:
            limit_s = min(1.0, self._every_s / 2)
            with Control(self._control, timeout_s=limit_s, keys=self._keys) as control:
                control.renew(self._session)
        except RequestRejected as error:
            log.warning("the session's lease was not renewed: %s", error)
        except (LatentdError, OSError) as error:
            log.warning("no lease renewed on the control socket, trying the data one: %s", error)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._renew_on_data()

    def stop(self) -> None:
        """End the thread and leave the data socket unwatched."""
        self._waker.send(b"x")
        self._thread.join()
        self._release()

    def leave(self, at_end: Callable[[], object]) -> None:
        """The same without waiting: the thread (which may be the caller) does it when it ends, and
        calls `at_end`."""
        self._at_end = at_end
        self._waker.send(b"x")

    def _release(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._waker.close()
        self._wakee.close()
