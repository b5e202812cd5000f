"""What strangers and broken clients do to a daemon, each for as long as its pace lasts.

They count what they have sent: messages where there are any, else connections.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgpack

from latentd_client import fields, protocol, zmtp
from mutations import INTS, JUNK, mutated, requests
from raw_peers import RawPeer, connected

if TYPE_CHECKING:
    import random
    import socket
    from collections.abc import Callable

BATCH: Final = 20
"""Mutated messages sent at a time."""
SESSION_MESSAGES: Final = 400
"""Of a session, which is closed then."""
HELD: Final = 50
"""Connections with half a message, or half a handshake, at a time."""
DEALER: Final = zmtp.GREETING + zmtp.ready(b"DEALER")
BUSY: Final = struct.Struct(">BQ")


class Pace:
    """Says when to stop: after `most` counts or `seconds`; and keeps to `rate` counts a second."""

    def __init__(self, most: int, seconds: float, rate: float) -> None:
        self.count = 0
        self._most = most
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._rate = rate

    def goes_on(self, count: int = 1) -> bool:
        """Count, wait if that was early, and say whether there is more to do."""
        self.count += count
        now = time.monotonic()
        early_s = self._begin + self.count / self._rate - now
        if early_s > 0:
            time.sleep(min(early_s, max(0.0, self._end - now)))
        return self.count < self._most and now < self._end


def mutate(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Nearly right messages of a session with a slot; what is right among them is done."""
    goes_on = True
    while goes_on:
        peer = RawPeer(endpoint)
        session: str = peer.ask(id=0, op="hello", versions=[1, 1])["session"]
        opened = {"op": "open", "session": session, "key": "first", "prompt": [1, 2, 3]}
        peer.send([protocol.encode({"v": 1, "id": 1, **opened})])
        goes_on = _mutate(peer, session, draw, pace)
        peer.send([protocol.encode({"v": 1, "id": 2, "op": "close", "session": session})])
        peer.settle()
        peer.close()


def mutate_foreign(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Nearly right messages of nobody's session."""
    goes_on = True
    while goes_on:
        peer = RawPeer(endpoint)
        goes_on = _mutate(peer, "0123456789abcdef" * 3, draw, pace)
        peer.settle()
        peer.close()


def _mutate(peer: RawPeer, session: str, draw: random.Random, pace: Pace) -> bool:
    """Messages of one connection; whether there is time for another. Raises Silence for one
    without a reply."""
    seat = {"slot": 0, "epoch": 0, "pos": 3}
    for _ in range(SESSION_MESSAGES // BATCH):
        rights = [draw.choice(requests(session, seat, peer.sent + i)) for i in range(BATCH)]
        replies = peer.send([mutated(right, draw) for right in rights])
        for reply in (*replies, *peer.receive(0.0)):
            _follow(seat, reply)
        if not pace.goes_on(BATCH):
            return False
    return True


def _follow(seat: dict[str, int], reply: dict[str, Any]) -> None:
    """Where the slot stands now, so that requests stay nearly right."""
    for name, told in (("slot", "slot"), ("epoch", "epoch"), ("pos", "context_len")):
        if type(reply.get(told)) is int:
            seat[name] = reply[told]


def mutate_control(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """The same at the control socket, all but `drain`, which ours may do."""
    ops = [op for op in (*fields.CONTROL_OPS, "open", "fly", "", None) if op != "drain"]
    peer = RawPeer(endpoint)
    while True:
        header = {"v": 1, "id": peer.sent, "op": draw.choice(ops), "session": "0" * 48}
        header[draw.choice(("session", "request", "v", "id"))] = draw.choice((*JUNK, *INTS))
        with contextlib.suppress(OverflowError, ValueError):
            peer.send([[msgpack.packb(header)]])
        while peer.sent - peer.answered > BATCH:  # it rests, and gives others their turn
            peer.receive(0.1)
        if not pace.goes_on():
            break
    peer.settle()
    peer.close()


def garbage(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Connections that say something else than they should and are closed by either side; some are
    kept, with half a message or half a handshake."""
    held: deque[socket.socket] = deque()
    while pace.goes_on():
        sock = connected(endpoint)
        said = draw.choice(GARBAGE)(draw)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.send(said)
        if draw.random() < 0.5:
            sock.close()
            continue
        held.append(sock)
        if len(held) > HELD:
            held.popleft().close()
    for sock in held:
        sock.close()


def come_and_go(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Connections that are closed at once."""
    while pace.goes_on():
        connected(endpoint).close()


def flood(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Right requests, as many as go in, whose replies are read late."""
    peer = RawPeer(endpoint)
    pings = [protocol.encode({"v": 1, "id": number, "op": "ping"}) for number in range(BATCH)]
    while pace.goes_on(BATCH):
        peer.send(pings)
    peer.settle()
    peer.close()


def heartbeats(endpoint: str, draw: random.Random, pace: Pace) -> None:
    """Commands and endless small frames, which are no messages yet."""
    sock = connected(endpoint)
    sock.sendall(DEALER)
    parts = (zmtp.command(b"PING", b"\0\0" + b"c" * 16) * 8, zmtp.frame(b"", zmtp.MORE) * 100)
    sock.setblocking(False)
    while pace.goes_on():
        try:
            sock.send(draw.choice(parts))
            sock.recv(1 << 16)
        except BlockingIOError:
            continue
        except OSError:  # beyond a limit
            sock.close()
            sock = connected(endpoint)
            sock.sendall(DEALER)
            sock.setblocking(False)
    sock.close()


def _greeting(draw: random.Random) -> bytes:
    greeting = bytearray(zmtp.GREETING)
    greeting[draw.randrange(64)] = draw.randrange(256)
    return bytes(greeting) + zmtp.ready(b"DEALER")


def _mechanism(draw: random.Random) -> bytes:
    name = draw.choice((b"CURVE", b"PLAIN", b"GSSAPI", b"", draw.randbytes(20)))
    return zmtp.GREETING[:12] + name.ljust(20, b"\0") + zmtp.GREETING[32:]


def _giant(draw: random.Random) -> bytes:
    size = draw.choice(((16 << 20) + 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1))
    return DEALER + BUSY.pack(draw.randrange(8), size) + b"x" * 100


def _half(draw: random.Random) -> bytes:
    return DEALER + BUSY.pack(zmtp.LONG, 16 << 20) + bytes(draw.randrange(1 << 15))


def _unread(draw: random.Random) -> bytes:
    ping = protocol.encode({"v": 1, "id": 1, "op": "ping"})
    return DEALER + zmtp.message(ping) * 20


GARBAGE: Final[tuple[Callable[[random.Random], bytes], ...]] = (
    lambda draw: os.urandom(draw.randrange(1, 3000)),
    lambda draw: DEALER + draw.randbytes(draw.randrange(1, 3000)),
    lambda draw: DEALER[: draw.randrange(len(DEALER))],
    lambda draw: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda draw: zmtp.GREETING + zmtp.ready(draw.choice((b"REQ", b"PUB", b"", b"\xff" * 200))),
    lambda draw: zmtp.GREETING + zmtp.frame(b"before the handshake is over"),
    lambda draw: DEALER + zmtp.frame(b"head", zmtp.MORE) * draw.randrange(1, 40),
    lambda draw: DEALER + zmtp.command(b"ERROR", b"\0"),
    _greeting, _mechanism, _giant, _half, _unread,
)  # fmt: skip
"""What a connection begins with, and perhaps all that it says."""

DATA: Final = {"mutate": mutate, "mutate_foreign": mutate_foreign, "garbage": garbage,
               "come_and_go": come_and_go, "flood": flood, "heartbeats": heartbeats}  # fmt: skip
"""Attacks on the data socket."""
CONTROL: Final = {"mutate_control": mutate_control}
"""Attacks on the control socket."""
MUTATING: Final = ("mutate", "mutate_foreign")
"""Which of them send messages by number."""
WORKING: Final = ("mutate",)
"""Which of them have work done, which others' steps share the device with."""
