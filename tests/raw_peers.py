"""A connection of one's own to the daemon, as a client that says what it likes."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any, Final

from dialling import dial
from latentd_client import protocol, zmtp

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE_S: Final = 60.0
"""Longest wait for anything that the daemon owes: it may be in the middle of others' work."""


class Silence(AssertionError):
    """The daemon does not answer."""


def connected(endpoint: str) -> socket.socket:
    """A fresh connection; more than the daemon's backlog have to wait."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return dial(endpoint, PATIENCE_S)
        except BlockingIOError:
            if time.monotonic() > end:
                raise Silence("the daemon takes no connection") from None
            time.sleep(0.002)


class RawPeer:
    """A DEALER in our own bytes. It counts what it has sent and the last replies (those without
    `more`): every message gets one."""

    def __init__(self, endpoint: str) -> None:
        self._sock = connected(endpoint)
        self._reader = zmtp.FrameReader(1 << 30, 64, 1 << 30)
        self.sent = self.answered = 0
        self._sock.sendall(zmtp.GREETING + zmtp.ready(b"DEALER"))
        expected, said = zmtp.GREETING + zmtp.ready(b"ROUTER"), b""
        while len(said) < len(expected) and (data := self._sock.recv(len(expected) - len(said))):
            said += data
        if said != expected:
            raise Silence(f"the daemon shook hands with {said!r}")

    def send(self, messages: Sequence[Sequence[bytes | memoryview]]) -> list[dict[str, Any]]:
        """Send messages, and read meanwhile; the replies that came."""
        data = memoryview(b"".join(zmtp.message(frames) for frames in messages))
        self.sent += len(messages)
        replies = []
        end = time.monotonic() + PATIENCE_S
        while data:
            self._sock.setblocking(False)
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                if not (got := self.receive(0.01)) and time.monotonic() > end:
                    raise Silence("the daemon reads no more") from None
                replies += got
        return replies

    def ask(self, **header: Any) -> dict[str, Any]:
        """The reply to a request, when nothing else is on its way."""
        self.send([protocol.encode({"v": 1, **header})])
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if replies := self.receive(0.1):
                return replies[-1]
        raise Silence(f"no reply to {header}")

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """The replies that are there, after waiting for the first bytes."""
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(1 << 18)
        except (TimeoutError, BlockingIOError):
            return []
        if not data:
            raise Silence("the daemon has closed the connection")
        self._reader.feed(memoryview(data))
        replies = []
        while (frames := self._reader.next()) is not None:
            header = protocol.decode_header(frames[0])
            replies.append(header)
            self.answered += not header.get("more")
        return replies

    def settle(self) -> list[dict[str, Any]]:
        """Wait until every message has had its reply."""
        replies = []
        end = time.monotonic() + PATIENCE_S
        while self.answered < self.sent:
            if time.monotonic() > end:
                raise Silence(f"{self.sent - self.answered} of {self.sent} messages got no reply")
            replies += self.receive(0.5)
        assert self.answered == self.sent, f"{self.answered} replies to {self.sent} messages"
        return replies

    def close(self) -> None:
        """Close it, whatever is on its way."""
        self._sock.close()
