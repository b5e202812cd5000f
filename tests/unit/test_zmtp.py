"""The client's own ZMTP connection, against a ROUTER of libzmq and against peers by hand."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from latentd_client import Client, protocol
from latentd_client._handshake import READY
from latentd_client._link import Link
from latentd_client._request import Call
from latentd_client._wire import Wire, ZmqWire, open_wire
from latentd_client._zmtp import ZmtpWire
from latentd_client.errors import ConnectionLost, DeadlineExceeded
from latentd_client.zmtp import GREETING, MORE, command, frame
from serving import serving

MESSAGES = [
    [b""],
    [b"x"],
    [b"a" * 255],
    [b"b" * 256],
    [b"header", b"", b"c" * 70_000],
    [os.urandom(3_000_000), b"tail"],
    [b"%d" % i for i in range(129)],
]


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z") / "s"


@pytest.fixture
def router(path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.bind(f"ipc://{path}")
        yield socket


class ByHand:
    """A listener that shakes hands and then sends the bytes it is told to."""

    def __init__(self, path: Path, greeting: bytes = GREETING, ready: bytes = READY) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answers = (greeting, ready)
        self.peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._shake)
        self._thread.start()

    def _shake(self) -> None:
        self.peer, _ = self._listener.accept()
        with contextlib.suppress(OSError):  # the other side may find the greeting wrong and leave
            self.peer.sendall(self._answers[0])
            self.peer.recv(64, socket.MSG_WAITALL)
            self.peer.sendall(self._answers[1])

    def connected(self) -> socket.socket:
        self._thread.join(60)
        assert self.peer is not None
        self.peer.recv(len(READY), socket.MSG_WAITALL)
        return self.peer

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()
        if self.peer is not None:
            self.peer.close()


def wire_to(path: Path) -> ZmtpWire:
    return ZmtpWire(f"ipc://{path}", 10.0)


def await_message(wire: Wire) -> list[bytes]:
    for _ in range(100):
        message = wire.receive()
        if message is not None:
            return message
        wire.poll(100)
    raise AssertionError("no message within 10 s")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{sum(map(len, message))} bytes")
def test_messages_of_every_size_travel_both_ways(
    path: Path, router: zmq.Socket[bytes], message: list[bytes]
) -> None:
    wire = wire_to(path)
    assert wire.send(message)
    while not router.poll(0):
        wire.poll(1)  # what did not fit into the socket leaves while the caller waits
    peer, *received = router.recv_multipart()
    assert received == message
    router.send_multipart([peer, *received])
    router.send_multipart([peer, b"next"])
    assert await_message(wire) == message
    assert await_message(wire) == [b"next"]
    wire.close()


def test_frames_that_arrive_byte_by_byte_are_put_together(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    received = []
    for byte in frame(b"head", 1) + frame(b"z" * 300) + frame(b"last"):
        peer.sendall(bytes((byte,)))
        if (message := wire.receive()) is not None:
            received.append(message)
    assert received == [[b"head", b"z" * 300], [b"last"]]
    wire.close()
    hand.close()


def test_a_heartbeat_is_answered_and_is_no_message(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    peer.sendall(command(b"PING", b"\0\x64mark") + frame(b"message"))
    assert await_message(wire) == [b"message"]
    assert peer.recv(64) == command(b"PONG", b"mark")
    wire.close()
    hand.close()


def test_a_message_that_does_not_fit_is_sent_in_parts_and_the_next_one_waits(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    assert wire.send([b"a" * 2_000_000])
    assert not wire.send([b"b"])  # nothing of it is sent before the first has left
    received = bytearray()
    while len(received) < 2_000_009:
        received += peer.recv(1 << 20)
        wire.poll(1)
    assert wire.send([b"b"])
    assert received == frame(b"a" * 2_000_000)
    assert peer.recv(64) == frame(b"b")
    wire.close()
    hand.close()


def test_a_heartbeat_in_the_middle_of_a_message_is_answered_behind_it(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    assert wire.send([b"a" * 2_000_000])
    peer.sendall(command(b"PING", b"\0\x64mark") + frame(b"message"))
    assert await_message(wire) == [b"message"]
    expected = frame(b"a" * 2_000_000) + command(b"PONG", b"mark")
    received = bytearray()
    while len(received) < len(expected):
        received += peer.recv(1 << 20)
        wire.poll(1)
    assert received == expected
    wire.close()
    hand.close()


@pytest.mark.parametrize("spin_s", [0.0005, 0.0])
def test_a_long_message_behind_a_slow_call_leaves_at_once(
    path: Path, router: zmq.Socket[bytes], spin_s: float
) -> None:
    """It leaves in parts, while the client naps until the time at which a reply is due."""
    slow_s, delays = 2.0, [2.0, 0.0]

    def answer() -> None:
        for delay in delays:
            peer, header, *_ = router.recv_multipart()
            time.sleep(delay)
            request = protocol.decode_header(header)
            reply = {"v": 1, "id": request["id"], "status": "ok"}
            router.send_multipart([peer, *protocol.encode(reply)])

    answering = threading.Thread(target=answer)
    answering.start()
    link = Link(f"ipc://{path}", spin_s)
    link.perform(Call("open", {}), 10.0)
    start = time.monotonic()
    link.perform(Call("open", {}, [np.zeros(1 << 20, np.int32)]), 10.0)
    assert time.monotonic() - start < 0.75 * slow_s
    answering.join()
    link.close()


def test_a_message_that_does_not_go_out_any_more_leaves_the_last_words_to_be_read(
    path: Path,
) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    hand.connected().sendall(frame(b"first") + frame(b"last words"))
    hand.close()
    assert not wire.send([b"x"])
    assert (wire.losses(), wire.receive()) == (0, [b"first"])
    assert not wire.send([b"x"])
    assert (wire.losses(), wire.receive()) == (0, [b"last words"])
    assert not wire.send([b"x"])
    assert wire.losses() == 1


def test_what_was_sent_before_the_end_is_read_before_the_loss_is_told(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    hand.connected().sendall(frame(b"last words"))
    hand.close()
    assert wire.losses() == 0
    assert wire.receive() == [b"last words"]
    assert wire.losses() == 1
    assert not wire.send([b"x"])
    assert not wire.poll(1000)
    with pytest.raises(ConnectionLost, match="no daemon listens"):
        wire.reconnect(10.0)


def test_a_lost_connection_is_made_again_on_request_only(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    hand.connected()
    hand.close()
    path.unlink()
    assert wire.losses() == 1
    again = ByHand(path)
    assert not wire.send([b"x"])
    wire.reconnect(10.0)
    peer = again.connected()
    assert wire.send([b"x"])
    assert peer.recv(64) == frame(b"x")
    assert wire.losses() == 1
    wire.close()
    again.close()


@pytest.mark.parametrize(
    ("greeting", "ready", "text"),
    [
        (b"HTTP/1.1 400 Bad Request".ljust(64), READY, "does not speak ZMTP 3"),
        (GREETING.replace(b"NULL\0", b"CURVE"), READY, "asks for the mechanism CURVE, not NULL"),
        (GREETING, command(b"ERROR", b"\x07go away"), "refused the connection: .*go away"),
    ],
)
def test_a_peer_that_is_no_daemon_is_named(
    path: Path, greeting: bytes, ready: bytes, text: str
) -> None:
    hand = ByHand(path, greeting, ready)
    with pytest.raises(ConnectionLost, match=text):
        wire_to(path)
    hand.close()


def test_a_frame_of_an_absurd_size_ends_the_connection(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    hand.connected().sendall(b"\x02" + (1 << 62).to_bytes(8, "big"))
    while wire.losses() == 0:
        assert wire.receive() is None
    hand.close()


def test_other_transports_go_through_libzmq() -> None:
    with serving("tcp://127.0.0.1:*") as running, Client(running.endpoint) as client:
        assert isinstance(client._session.link.wire, ZmqWire)
        slot = client.open([1, 2, 3])
        assert slot.step().context_len == 4
        assert len(list(slot.stream(3))) == 3
    with pytest.raises(ConnectionLost, match="port"):
        open_wire("tcp://127.0.0.1:99999", 1.0)


def test_a_call_on_a_connection_that_was_lost_unseen_is_told_at_once(path: Path) -> None:
    hand = ByHand(path)
    link = Link(f"ipc://{path}", 0.0005)
    hand.connected()
    hand.close()
    link.wire.losses()  # somebody has looked: the call finds no change
    start = time.monotonic()
    with pytest.raises(ConnectionLost, match="broke"):
        link.perform(Call("step", {}), 10.0)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("method", ["recv_into", "send"])
def test_an_interrupt_in_the_middle_of_a_transfer_gives_the_connection_up(
    path: Path, method: str
) -> None:
    """The bytes are out of the kernel, or in it, and nobody has noted how many."""
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    whole = wire._socket

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

        def recv_into(self, buffer: bytearray) -> int:
            assert whole is not None
            whole.recv_into(buffer)
            raise KeyboardInterrupt

        def send(self, data: bytes) -> int:
            assert whole is not None
            whole.send(data[:3])
            raise KeyboardInterrupt

    wire._socket = Interrupted()  # type: ignore[assignment]
    peer.sendall(frame(b"torn"))
    with pytest.raises(KeyboardInterrupt):
        wire.receive() if method == "recv_into" else wire.send([b"message"])
    assert wire.losses() == 1
    assert wire.is_lost
    assert wire.receive() is None
    hand.close()


def test_a_handshake_that_drips_ends_in_time(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def drip() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            for byte in GREETING:
                peer.sendall(bytes((byte,)))
                time.sleep(0.1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    start = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"did not say hello within 0\.4 s"):
        ZmtpWire(f"ipc://{path}", 0.4)
    assert time.monotonic() - start < 5  # of 6.4 s
    dripping.join()
    listener.close()


def test_a_full_queue_of_connections_is_tried_again(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = []
        for _ in range(3):  # one more than fit
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            waiting.append(sock)
            with contextlib.suppress(BlockingIOError):
                sock.connect(str(path))
        with pytest.raises(ConnectionLost, match="did not say hello"):
            ZmtpWire(f"ipc://{path}", 0.3)
        for sock in waiting:
            sock.close()


def test_a_flood_of_foreign_replies_does_not_stretch_a_call(path: Path) -> None:
    hand = ByHand(path)
    link = Link(f"ipc://{path}", 0.0005)
    peer = hand.connected()
    ends = threading.Event()
    junk = frame(bytes(protocol.encode({"v": 1, "id": 999, "status": "ok"})[0])) * 100

    def flood() -> None:
        with contextlib.suppress(OSError):
            while not ends.is_set():
                peer.sendall(junk)

    flooding = threading.Thread(target=flood)
    flooding.start()
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        link.perform(Call("step", {}), 0.3)
    assert time.monotonic() - start < 10
    ends.set()
    link.close()
    flooding.join()
    hand.close()


def test_a_message_without_an_end_is_the_end(path: Path) -> None:
    hand = ByHand(path)
    wire = wire_to(path)
    peer = hand.connected()
    with contextlib.suppress(OSError):
        for _ in range(100):
            peer.sendall(frame(b"", MORE) * 100)
            wire.receive()
    assert wire.is_lost
    hand.close()
