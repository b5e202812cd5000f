"""One connection of the daemon's own ZMTP: its handshake, its messages, its queue of replies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from latentd import credentials
from latentd.routing import SEND_QUEUE
from latentd.zmtp_greeter import Greeter
from latentd_client import zmtp

if TYPE_CHECKING:
    import socket

    from latentd.routing import Frames

TURN_FRAMES: Final = 16
"""Frames looked at in one turn: thousands of tiny ones come in one read, and others wait."""
QUEUED_BYTES: Final = 64 << 20
"""Bytes of replies with which a peer's queue is full, as with SEND_QUEUE of them."""
STREAM_SHARE: Final = 2
"""Streams fill one part in so many of a queue, so that they alone do not keep it full."""
READY: Final = zmtp.ready(b"ROUTER")


class ZmtpPeer:
    """The daemon's end of a connection. `is_lost`: it broke, or said what it must not (`fault`);
    whoever sees that closes it. `is_busy` says that its next message may be there already,
    `is_paused` that it is not read, as it `is_full`, `is_resting` the same for a moment, and
    `is_bulky` that it is in the middle of a long message (the owner sets these)."""

    def __init__(
        self, sock: socket.socket, name: bytes, reader: zmtp.FrameReader, came_at: float
    ) -> None:
        """Say hello on a fresh connection."""
        self.name = name
        self.who = credentials.of_socket(sock)
        self.socket = sock
        self.came_at = came_at
        self.mask = 0  # what the owner waits for
        self.is_lost = False
        self.is_busy = False
        self.is_paused = False
        self.is_resting = False
        self.is_bulky = False
        self.was_plain = False  # the last read was one whole message and nothing else
        self.fault = ""
        self._is_refused = False
        self._greeter: Greeter | None = Greeter()  # until hands were shaken
        self._reader = reader
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._send(zmtp.GREETING)

    @property
    def has_queue(self) -> bool:
        """Whether bytes wait until the peer takes more."""
        return bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether so many replies wait that nothing more should be asked."""
        return len(self._queue) >= SEND_QUEUE or self._queued_bytes >= QUEUED_BYTES

    @property
    def has_room(self) -> bool:
        """Whether a stream may go on."""
        return (
            len(self._queue) < SEND_QUEUE // STREAM_SHARE
            and self._queued_bytes < QUEUED_BYTES // STREAM_SHARE
        )

    @property
    def held_bytes(self) -> int:
        """What is kept for the peer."""
        return self._reader.held_bytes + self._queued_bytes

    @property
    def unfinished(self) -> int:
        """See FrameReader.unfinished; a handshake does not grow: it has its time as a whole."""
        return self._reader.unfinished if self._greeter is None else 1

    @property
    def count(self) -> int:
        """The true number of frames of the last message."""
        return self._reader.count

    def read(self, chunk: bytearray) -> list[bytes] | None:
        """Take what has arrived, at most a chunk, and return the next message."""
        self.was_plain = False
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
        if chunk[0] == 0 and size == chunk[1] + 2 and reader.is_empty and self._greeter is None:
            reader.count = 1
            self.was_plain = True
            return [bytes(chunk[2:size])]  # nearly always
        data = memoryview(chunk)[:size]
        if self._greeter is not None:
            data = self._greet(self._greeter, data)
        try:
            reader.feed(data)
        except MemoryError:  # what it has sent so far goes with it
            self.is_lost = True
            return None
        return self.next()

    def next(self) -> list[bytes] | None:
        """The next message of what was read before."""
        self.was_plain = False
        reader = self._reader
        try:
            message = None if self.is_lost else reader.next(TURN_FRAMES)
        except (zmtp.BrokenStream, MemoryError):
            self.is_lost = True
            return None
        for body in reader.take_commands():
            self._obey(body)
        self.is_busy = (message is not None or reader.is_cut) and reader.has_more
        return message

    def refuse(self) -> None:
        """End the handshake, which has only begun, with a refusal."""
        self._is_refused = True

    def _greet(self, greeter: Greeter, data: memoryview) -> memoryview:
        """Go on with the handshake; what is left behind it."""
        was_greeted = greeter.is_greeted
        data = greeter.feed(data)
        if greeter.is_greeted and not was_greeted and not self._is_refused:
            self._send(READY)  # also to one that will be dropped: it does no harm
        if greeter.is_done and self._is_refused:  # not before: what it still sent would be torn
            self.fault = f"is {self.who}, who may not connect (allow_users, allow_groups)"
            self.is_lost = True
            self._send(zmtp.error(zmtp.NO_ACCESS))
        elif greeter.is_done:
            self._greeter = None
        elif greeter.fault:
            self.fault = greeter.fault
            self.is_lost = True
            if greeter.is_greeted:
                self._send(zmtp.error(greeter.fault))
        return data

    def _obey(self, body: bytes) -> None:
        """A heartbeat wants its answer; nothing else concerns us."""
        if body[:6] == b"\x05ERROR":
            self.is_lost = True
        elif answer := zmtp.pong(body):
            self._send(answer)

    def send(self, frames: Frames) -> bool:
        """Send a message, or queue what does not fit; whether all has left."""
        return self._send(zmtp.message(frames))

    def _send(self, data: bytes) -> bool:
        sent = 0 if self._queue else self._write(data)
        if sent == len(data):
            return True
        self._queue.append(memoryview(data)[sent:])
        self._queued_bytes += len(data) - sent
        return False

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
