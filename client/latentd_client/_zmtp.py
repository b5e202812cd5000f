"""A DEALER's side of one ipc connection, spoken on the caller's own thread.

libzmq hands every message to a thread of its own and back. On ipc that costs a step two wake-ups,
31 us of about 100 (measured against a ROUTER of libzmq, which notices no difference), and more when
the processors have gone to sleep. This is ZMTP 3.1 with the NULL mechanism and nothing else
(RFC 37, https://rfc.zeromq.org/spec/37); other transports go through libzmq (`_wire`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from latentd_client.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Sequence

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, not a server, filler: 64 bytes."""
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame; a LONG one has its size in 8 bytes, others in one."""
MAX_FRAME_BYTES: Final = 1 << 30
CHUNK_BYTES: Final = 1 << 18


def frame(body: bytes | memoryview, flags: int = 0) -> bytes:
    """A frame of the wire."""
    size = len(body)
    if size < 256:
        return bytes((flags, size)) + body
    return bytes((flags | LONG,)) + size.to_bytes(8, "big") + body


def command(name: bytes, data: bytes) -> bytes:
    """A command frame."""
    return frame(bytes((len(name),)) + name + data, COMMAND)


READY: Final = command(b"READY", b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER")


class ZmtpWire:
    """A `Wire` to an ipc endpoint."""

    monitored = None

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        """Connect and shake hands. Raises ConnectionLost."""
        self.endpoint = endpoint
        self._socket: socket.socket | None = None
        self._losses = 0
        self._chunk = bytearray(CHUNK_BYTES)
        self._connect(timeout_s)

    def _connect(self, timeout_s: float) -> None:
        self._unread = bytearray()
        self._frames: list[bytes] = []
        self._ready: deque[list[bytes]] = deque()
        self._unsent = memoryview(b"")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(timeout_s, 3600.0))
            sock.connect(self.endpoint.removeprefix("ipc://"))
            sock.sendall(GREETING)
            theirs = _read(sock, len(GREETING))
            if theirs[0] != 0xFF or not theirs[9] & 1 or theirs[10] < 3:
                raise ConnectionLost(f"{self.endpoint} does not speak ZMTP 3")
            if theirs[12:32] != GREETING[12:32]:
                text = bytes(theirs[12:32]).rstrip(b"\0").decode("ascii", "replace")
                raise ConnectionLost(f"{self.endpoint} asks for the mechanism {text}, not NULL")
            sock.sendall(READY)
            self._expect_ready(sock)
        except TimeoutError:
            sock.close()
            text = f"{self.endpoint} did not say hello within {timeout_s:.3g} s"
            raise ConnectionLost(text) from None
        except OSError as error:
            sock.close()
            raise no_daemon(self.endpoint, error) from None
        except BaseException:
            sock.close()
            raise
        sock.setblocking(False)
        self._socket = sock
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def _expect_ready(self, sock: socket.socket) -> None:
        flags, size = _read(sock, 2)
        body = _read(sock, size)
        if flags != COMMAND or body[:6] != b"\x05READY":
            raise ConnectionLost(f"{self.endpoint} refused the connection: {bytes(body)!r:.80}")

    def send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """See Wire.send."""
        if self._socket is None or (self._unsent and not self._flush()):
            return False
        data = frame(frames[-1])
        if len(frames) > 1:
            data = b"".join([*(frame(part, MORE) for part in frames[:-1]), data])
        sent = self._write(data)
        if 0 < sent < len(data):
            self._unsent = memoryview(data)[sent:]
        return sent > 0

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes went out; -1 when the connection is lost."""
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._lose()
            return -1

    def _flush(self) -> bool:
        """Send on what a full buffer has left over; whether all has gone out."""
        sent = self._write(self._unsent)
        if sent > 0:
            self._unsent = self._unsent[sent:]
        return sent >= 0 and not self._unsent

    def receive(self) -> list[bytes] | None:
        """See Wire.receive."""
        ready = self._ready
        if ready:
            return ready.popleft()
        if self._unsent:
            self._flush()
        if self._socket is None:
            return None
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
        if chunk[0] == 0 and size == chunk[1] + 2 and not self._unread and not self._frames:
            return [bytes(chunk[2:size])]  # nearly always
        self._unread += memoryview(chunk)[:size]
        self._parse()
        return ready.popleft() if ready else None

    def _parse(self) -> None:
        """Take whole frames out of what was read."""
        unread, at = self._unread, 0
        while len(unread) - at >= 2:
            flags, start = unread[at], at + 2
            size = unread[at + 1]
            if flags & LONG:
                start = at + 9
                if len(unread) < start:
                    break
                size = int.from_bytes(unread[at + 1 : start], "big")
                if size > MAX_FRAME_BYTES:
                    self._lose()
                    return
            if len(unread) - start < size:
                break
            at = start + size
            body = bytes(unread[start:at])
            if flags & COMMAND:
                self._obey(body)
                continue
            self._frames.append(body)
            if not flags & MORE:
                self._ready.append(self._frames)
                self._frames = []
        del unread[:at]

    def _obey(self, body: bytes) -> None:
        """A heartbeat wants its answer, behind what is still to be sent; nothing else concerns a
        DEALER."""
        if body[:5] == b"\x04PING":
            self._unsent = memoryview(bytes(self._unsent) + command(b"PONG", body[7:]))
            self._flush()

    def poll(self, timeout_ms: int) -> bool:
        """See Wire.poll."""
        if self._ready or self._socket is None:
            return bool(self._ready)
        end = time.monotonic() + timeout_ms / 1000
        while self._socket is not None:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            self._poller.modify(self._socket, wanted)
            left_ms = max(0.0, end - time.monotonic()) * 1000
            events = self._poller.poll(math.ceil(left_ms))
            if not events:
                return False
            if events[0][1] & ~select.POLLOUT:
                return True
            self._flush()
        return False

    def losses(self) -> int:
        """See Wire.losses."""
        if self._socket is not None and not self._ready:
            try:
                is_open = bool(self._socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                is_open = True
            except OSError:
                is_open = False
            if not is_open:
                self._lose()
        return self._losses

    def reconnect(self, timeout_s: float) -> None:
        """See Wire.reconnect."""
        self.losses()
        if self._socket is None:
            self._connect(timeout_s)

    def _lose(self) -> None:
        self._losses += 1
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def no_daemon(endpoint: str, error: OSError) -> ConnectionLost:
    """The error for an ipc path at which nobody listens."""
    reason = error.strerror or str(error)
    return ConnectionLost(f"no daemon listens at {endpoint}: {reason}; is it running?")


def check_listener(endpoint: str) -> None:
    """Raise ConnectionLost unless somebody listens on an ipc path. libzmq would not tell: it
    connects to a dead path and sends into the void. Other transports are not looked at."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            raise no_daemon(endpoint, error) from None


def _read(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises OSError."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        data += part
    return data
