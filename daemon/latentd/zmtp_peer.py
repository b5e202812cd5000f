"""One connection of the daemon's own ZMTP: its handshake, its messages, its queue of replies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from latentd.routing import SEND_QUEUE
from latentd_client import zmtp

if TYPE_CHECKING:
    import socket

    from latentd.routing import Frames

QUEUED_BYTES: Final = 64 << 20
"""Bytes that a peer's queue holds beside its newest message."""
READY: Final = zmtp.ready(b"ROUTER")
CLIENTS: Final = (b"DEALER", b"REQ", b"ROUTER")
"""Kinds of sockets that may talk to a ROUTER."""


class ZmtpPeer:
    """The daemon's end of a connection. `is_lost`: it broke, or said what it must not; whoever sees
    that closes it. `is_busy` says that its next message may be there already."""

    def __init__(
        self, socket: socket.socket, name: bytes, max_frame_bytes: int, max_frames: int
    ) -> None:
        """Say hello on a fresh connection."""
        self.name = name
        self.socket = socket
        self.is_open = False  # hands were shaken
        self.is_lost = False
        self.is_busy = False
        self._greeting: bytearray | None = bytearray()  # what came of it; None when it is whole
        self._reader = zmtp.FrameReader(max_frame_bytes, max_frames)
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._send(zmtp.GREETING)

    @property
    def has_queue(self) -> bool:
        """Whether bytes wait until the peer takes more."""
        return bool(self._queue)

    @property
    def count(self) -> int:
        """The true number of frames of the last message."""
        return self._reader.count

    def read(self, chunk: bytearray) -> list[bytes] | None:
        """Take what has arrived, at most a chunk, and return the next message."""
        try:
            size = self.socket.recv_into(chunk)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
        if not size:
            self.is_lost = True
            return None
        reader = self._reader
        if self.is_open and chunk[0] == 0 and size == chunk[1] + 2 and reader.is_empty:
            reader.count = 1
            return [bytes(chunk[2:size])]  # nearly always
        data = memoryview(chunk)[:size]
        if self._greeting is not None:
            data = self._greet(self._greeting, data)
        reader.feed(data)
        return self.next()

    def next(self) -> list[bytes] | None:
        """The next message of what was read before."""
        reader = self._reader
        try:
            message = None if self.is_lost else reader.next()
        except zmtp.BrokenStream:
            self.is_lost = True
            return None
        for body in reader.take_commands():
            self._obey(body)
        if message is not None and not self.is_open:
            self.is_lost = True  # it speaks before hands are shaken
            return None
        self.is_busy = message is not None and reader.has_more
        return message

    def _greet(self, greeting: bytearray, data: memoryview) -> memoryview:
        """Take the greeting out of what has arrived; what is left of it."""
        missing = len(zmtp.GREETING) - len(greeting)
        greeting += data[:missing]
        if greeting[0] != zmtp.GREETING[0]:
            self.is_lost = True
        elif len(greeting) == len(zmtp.GREETING):
            self._greeting = None
            self.is_lost = bool(zmtp.greeting_fault(greeting))
            self._send(READY)  # also to one that will be dropped: it does no harm
        return data[missing:]

    def _obey(self, body: bytes) -> None:
        """A heartbeat wants its answer, READY opens the connection; nothing else concerns us."""
        if not self.is_open:
            self.is_open = zmtp.socket_type(body) in CLIENTS
            self.is_lost |= not self.is_open
        elif body[:6] == b"\x05ERROR":
            self.is_lost = True
        elif (answer := zmtp.pong(body)) and len(self._queue) < SEND_QUEUE:
            self._send(answer)

    def send(self, frames: Frames) -> bool:
        """Send a message, or queue what does not fit; False when the queue is full."""
        if self._queue and (
            len(self._queue) >= SEND_QUEUE or self._queued_bytes >= QUEUED_BYTES
        ):  # fmt: skip
            return False
        self._send(zmtp.message(frames))
        return True

    def _send(self, data: bytes) -> None:
        sent = 0
        if not self._queue:
            sent = self._write(data)
        if sent < len(data):
            self._queue.append(memoryview(data)[sent:])
            self._queued_bytes += len(data) - sent

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes the system took."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.is_lost = True
            return 0

    def flush(self) -> None:
        """Send what is queued, as far as the peer takes it."""
        queue = self._queue
        while queue and not self.is_lost:
            sent = self._write(queue[0])
            self._queued_bytes -= sent
            if sent < len(queue[0]):
                queue[0] = queue[0][sent:]
                return
            queue.popleft()

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._queue.clear()
        self.socket.close()
