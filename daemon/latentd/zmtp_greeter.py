"""A peer's part of a handshake: its greeting, then the READY of a socket that may talk to us."""

from __future__ import annotations

from typing import Final

from latentd_client import zmtp

CLIENTS: Final = (b"DEALER", b"ROUTER")
"""Kinds of sockets that are served. A REQ would wait for replies behind an empty frame."""
MOST_BYTES: Final = 9 + zmtp.MAX_COMMAND_BYTES
"""Of a frame with READY."""


class Greeter:
    """Puts a handshake together from what arrives, and keeps at most a command of it. `fault` says
    why the peer cannot be served."""

    def __init__(self) -> None:
        self.is_greeted = False  # the greeting is whole
        self.is_done = False
        self.fault = ""
        self._said = bytearray()  # of the greeting, then of the command

    def feed(self, data: memoryview) -> memoryview:
        """Take what belongs to the handshake; what is left of the bytes."""
        said = self._said
        while data and not self.is_done and not self.fault:
            missing = self._size() - len(said)
            said += data[:missing]
            data = data[missing:]
            if self.is_greeted:
                self._look_at_command()
            elif said[0] != zmtp.GREETING[0]:
                self.fault = "does not speak ZMTP"
            elif len(said) == len(zmtp.GREETING):
                self.fault = zmtp.greeting_fault(said)
                self.is_greeted = True
                said.clear()
        return data

    def _size(self) -> int:
        """Bytes of what is being said, as far as one can tell yet."""
        said = self._said
        if not self.is_greeted:
            return len(zmtp.GREETING)
        if len(said) < 2:
            return 2
        if not said[0] & zmtp.LONG:
            return 2 + said[1]
        return 9 + int.from_bytes(said[1:9], "big") if len(said) >= 9 else 9

    def _look_at_command(self) -> None:
        said, size = self._said, self._size()
        if said[0] not in (zmtp.COMMAND, zmtp.COMMAND | zmtp.LONG) or size > MOST_BYTES:
            self.fault = "speaks before the handshake is over"
        elif len(said) == size:
            kind = zmtp.socket_type(bytes(said[9 if said[0] & zmtp.LONG else 2 :]))
            self.is_done = kind in CLIENTS
            if not self.is_done:
                name = kind[:20].decode("ascii", "replace") or "nameless"
                self.fault = f"is a {name} socket; use a DEALER"
