"""A DEALER's side of one ipc connection, spoken on the caller's own thread.

libzmq hands every message to a thread of its own and back. On ipc that costs a step two wake-ups,
31 us of about 100 (measured against a ROUTER of libzmq, which notices no difference), and more when
the processors have gone to sleep. This is ZMTP 3.1 (`zmtp`) with the NULL mechanism and nothing
else; other transports go through libzmq (`_wire`).
"""

from __future__ import annotations

import math
import select
import socket
import time
from typing import TYPE_CHECKING, Final

from latentd_client import zmtp
from latentd_client._handshake import handshake
from latentd_client._zmtp_inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_BYTES: Final = 1 << 18


class ZmtpWire:
    """A `Wire` to an ipc endpoint.

    An interrupt (Ctrl-C) may come between a system call and the note of what it did. `_is_busy`
    marks that stretch: who finds it set treats the connection as lost, as its bytes may be torn.
    """

    meeting = None

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        """Connect and shake hands. Raises ConnectionLost."""
        self.endpoint = endpoint
        self._socket: socket.socket | None = None
        self.known_losses = 0
        self._chunk = bytearray(CHUNK_BYTES)
        self._connect(timeout_s)

    def _connect(self, timeout_s: float) -> None:
        self._is_busy = False
        self._inbox = Inbox()
        self._ready = self._inbox.ready
        self._unsent = memoryview(b"")
        self._socket = handshake(self.endpoint, timeout_s)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        glance = select.poll()
        glance.register(self._socket, select.POLLIN)
        self._glance = glance.poll

    @property
    def is_lost(self) -> bool:
        """See Wire.is_lost."""
        return self._socket is None

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """See Wire.send."""
        self._check_torn()
        if self._socket is None or (self._unsent and not self._flush()):
            return False
        data = zmtp.message(frames)
        self._is_busy = True
        sent = self._write(data)
        if 0 < sent < len(data):
            self._unsent = memoryview(data)[sent:]
        self._is_busy = False
        return sent > 0

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes went out; -1 when no more will. That the daemon has left is told behind
        its last words, by reading."""
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return -1
        except OSError:
            self._lose()
            return -1

    def _flush(self) -> bool:
        """Send on what a full buffer has left over; whether all has gone out."""
        self._is_busy = True
        sent = self._write(self._unsent)
        if sent > 0:
            self._unsent = self._unsent[sent:]
        self._is_busy = False
        return sent >= 0 and not self._unsent

    def receive(self) -> list[bytes] | None:
        """See Wire.receive."""
        self._check_torn()
        ready = self._ready
        if ready:
            return ready.popleft()
        if self._unsent and self._socket is not None:
            self._flush()
        if self._socket is None:
            return None
        self._is_busy = True
        message = self._read()
        self._is_busy = False
        if self._unsent and not self.is_lost:  # a heartbeat's answer
            self._flush()
        return message

    def _read(self) -> list[bytes] | None:
        assert self._socket is not None
        chunk = self._chunk
        try:
            size = self._socket.recv_into(chunk)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if not size:
            self._lose()
            return None
        if chunk[0] == 0 and size == chunk[1] + 2 and self._inbox.reader.is_empty:
            return [bytes(chunk[2:size])]  # nearly always
        try:
            answers = self._inbox.feed(memoryview(chunk)[:size])
        except zmtp.BrokenStream:
            self._lose()
        else:
            if answers:  # behind what is still to be sent
                self._unsent = memoryview(bytes(self._unsent) + answers)
        return self._ready.popleft() if self._ready else None

    def poll(self, timeout_ms: int) -> bool:
        """See Wire.poll."""
        end = time.monotonic() + timeout_ms / 1000
        while not self._ready and self._socket is not None:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._poller.modify(self._socket, wanted)
            left_ms = max(0.0, end - time.monotonic()) * 1000
            events = self._poller.poll(math.ceil(left_ms))
            if not events:
                return False
            if events[0][1] & ~select.POLLOUT:
                return True
            self._flush()
        return bool(self._ready)

    def losses(self) -> int:
        """See Wire.losses."""
        self._check_torn()
        if self._socket is not None and not self._ready and self._glance(0):
            try:
                is_open = bool(self._socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                is_open = True
            except OSError:
                is_open = False
            if not is_open:
                self._lose()
        return self.known_losses

    def reconnect(self, timeout_s: float) -> None:
        """See Wire.reconnect."""
        self.losses()
        if self._socket is None:
            self._connect(timeout_s)

    def _check_torn(self) -> None:
        if self._is_busy:
            self._ready.clear()
            self._lose()

    def _lose(self) -> None:
        self.known_losses += 1
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._is_busy = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
