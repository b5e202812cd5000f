"""What a daemon says on an ipc connection: whole messages, and commands that want something."""

from __future__ import annotations

from collections import deque
from typing import Final

from latentd_client import zmtp

MAX_FRAME_BYTES: Final = 1 << 30
MAX_MESSAGE_BYTES: Final = 1 << 31
MAX_FRAMES: Final = 4096
"""Of a message; a daemon's have 129 at most. What is beyond a limit ends the connection."""


class Inbox:
    """Bytes go in, messages come out: `ready` has those that nobody has taken yet."""

    def __init__(self) -> None:
        self.reader = zmtp.FrameReader(MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES)
        self.ready: deque[list[bytes]] = deque()

    def feed(self, data: memoryview) -> bytes:
        """Take bytes over; what must be sent for them: a heartbeat wants its answer. Raises
        BrokenStream when the connection is of no use any more; messages before that are ready."""
        reader = self.reader
        reader.feed(data)
        while (message := reader.next()) is not None:
            self.ready.append(message)
        answers = b""
        for body in reader.take_commands():  # others do not concern a DEALER
            if body[:6] == b"\x05ERROR":
                raise zmtp.BrokenStream("the daemon has ended the connection")
            answers += zmtp.pong(body) or b""
        if reader.num_frames > MAX_FRAMES:
            raise zmtp.BrokenStream(f"a message of more than {MAX_FRAMES} frames")
        return answers
