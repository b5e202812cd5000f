"""ZMTP 3.1 without sockets: frames, commands, and messages put together from what arrives.

RFC 37, https://rfc.zeromq.org/spec/37, with the NULL mechanism. The client's own connection and the
daemon's share it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, not a server, filler: 64 bytes."""
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame; a LONG one has its size in 8 bytes, others in one."""
MAX_COMMAND_BYTES: Final = 4096
"""Of a command: READY has some properties, a heartbeat 16 bytes to send back."""
MAX_COMMANDS: Final = 64
"""Commands that come at once: between two looks for more bytes."""
MAX_MESSAGE_FRAMES: Final = 16384
"""Frames of a message, those included that are only counted."""
NO_ACCESS: Final = "400"
"""The reason of an ERROR for who may not connect: a status of ZAP, of which libzmq tells."""
READ_BYTES: Final = 1 << 18
"""Of a reader's buffer, after which what was read is taken out of it."""
LARGE_BYTES: Final = 1 << 12
"""From where on a view, which saves a copy of a frame, costs less than that."""
_LAST: Final = [bytes((0, size)) for size in range(256)]
"""The heads of short last frames, by size."""
_LONG_HEAD: Final = struct.Struct(">BQ").pack


class BrokenStream(ValueError):
    """Bytes that are no ZMTP, or beyond a limit: the end of a connection."""


def frame(body: bytes | memoryview, flags: int = 0) -> bytes:
    """A frame of the wire."""
    size = len(body)
    if size < 256:
        return (bytes((flags, size)) if flags else _LAST[size]) + body
    return _LONG_HEAD(flags | LONG, size) + body


def message(frames: Sequence[bytes | memoryview]) -> bytes:
    """A message of the wire."""
    if len(frames) == 1:
        return frame(frames[0])
    return b"".join([*(frame(part, MORE) for part in frames[:-1]), frame(frames[-1])])


def command(name: bytes, data: bytes) -> bytes:
    """A command frame."""
    return frame(bytes((len(name),)) + name + data, COMMAND)


def error(reason: str) -> bytes:
    """The command that refuses a connection; the reason has at most 255 characters."""
    return command(b"ERROR", bytes((len(reason),)) + reason.encode("ascii", "replace"))


def ready(socket_type: bytes) -> bytes:
    """The command that ends a handshake."""
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def socket_type(body: bytes) -> bytes:
    """What kind of socket a READY command tells of; nothing when it is none, or tells nothing."""
    at = 6
    while body[:6] == b"\x05READY" and at < len(body):
        name_end = at + 1 + body[at]
        value_at = name_end + 4
        end = value_at + int.from_bytes(body[name_end:value_at], "big")
        if body[at + 1 : name_end].lower() == b"socket-type":
            return body[value_at:end]
        at = end
    return b""


def greeting_fault(theirs: bytes | bytearray) -> str:
    """Why a greeting of 64 bytes cannot be answered; empty when it can."""
    if theirs[0] != 0xFF or not theirs[9] & 1 or theirs[10] < 3:
        return "does not speak ZMTP 3"
    if theirs[12:32] != GREETING[12:32]:
        mechanism = bytes(theirs[12:32]).rstrip(b"\0").decode("ascii", "replace")
        return f"asks for the mechanism {mechanism}, not NULL"
    return ""


def pong(body: bytes) -> bytes | None:
    """The answer to a command, if it is a heartbeat."""
    return command(b"PONG", body[7:]) if body[:5] == b"\x04PING" else None


class FrameReader:
    """Puts messages together. Commands that come between are kept for the owner to take; `count` is
    the true number of frames of the last message."""

    def __init__(self, max_frame_bytes: int, max_frames: int, max_message_bytes: int) -> None:
        """Frames of a message beyond `max_frames` are counted and not kept."""
        self._commands: list[bytes] = []
        self._num_commands = 0  # since bytes came last
        self.count = 0
        self.is_cut = False
        self._max_frame_bytes = max_frame_bytes
        self._max_frames = max_frames
        self._max_message_bytes = max_message_bytes
        self._unread = bytearray()
        self._at = 0  # what is before it is read
        self._frames: list[bytes] = []
        self._count = self._bytes = 0  # of the message that is not whole

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a message has arrived."""
        return not self._unread and not self._count

    @property
    def has_more(self) -> bool:
        """Whether another message may be whole already."""
        return len(self._unread) - self._at >= 2

    @property
    def unfinished(self) -> int:
        """A measure of what has come of the message that is not whole: it grows with every byte,
        and is 0 when there is none."""
        return self._bytes + self._count + len(self._unread) - self._at

    @property
    def held_bytes(self) -> int:
        """An upper bound of the bytes that are kept here."""
        return self._bytes + len(self._unread)

    @property
    def num_frames(self) -> int:
        """Frames of the message that is not whole yet."""
        return self._count

    def take_commands(self) -> list[bytes]:
        """The commands that have come since the last call."""
        taken = self._commands
        if taken:
            self._commands = []
        return taken

    def feed(self, data: memoryview) -> None:
        """Take bytes over."""
        self._unread += data
        self._num_commands = 0

    def next(self, max_looks: int = 1 << 62) -> list[bytes] | None:
        """The next whole message, or None. Looks at so many frames at most, commands among them
        (`is_cut`: there may be more to look at). Raises BrokenStream."""
        unread, at, end = self._unread, self._at, len(self._unread)
        whole, self.is_cut = None, False
        while whole is None and end - at >= 2:
            if not max_looks:
                self.is_cut = True
                break
            max_looks -= 1
            flags, size, start = unread[at], unread[at + 1], at + 2
            if flags & LONG:
                start = at + 9
                if end < start:
                    break
                size = int.from_bytes(unread[at + 1 : start], "big")
            most = MAX_COMMAND_BYTES if flags & COMMAND else self._max_frame_bytes
            if flags > (MORE | LONG | COMMAND) or size > most:
                raise BrokenStream(f"a frame of {size} bytes with flags {flags}")
            if not flags & COMMAND and size > self._max_message_bytes - self._bytes:
                raise BrokenStream(f"a message of more than {self._max_message_bytes} bytes")
            if end - start < size:
                break
            at = start + size
            part = unread[start:at] if size < LARGE_BYTES else memoryview(unread)[start:at]
            body = bytes(part)
            del part  # a view keeps the buffer as it is
            if flags & COMMAND:
                self._commands.append(body)
                self._num_commands += 1
                if self._num_commands > MAX_COMMANDS:
                    raise BrokenStream(f"more than {MAX_COMMANDS} commands at once")
                continue
            if self._count < self._max_frames:
                self._frames.append(body)
            self._count += 1
            self._bytes += size
            if self._count > MAX_MESSAGE_FRAMES:
                raise BrokenStream(f"a message of more than {MAX_MESSAGE_FRAMES} frames")
            if not flags & MORE:
                whole, self._frames = self._frames, []
                self.count, self._count, self._bytes = self._count, 0, 0
        if at == end or at > READ_BYTES:  # after each message, it would move what is behind it
            del unread[:at]
            at = 0
        self._at = at
        return whole
