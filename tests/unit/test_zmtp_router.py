"""The daemon's own ROUTER, against DEALERs of libzmq and against peers by hand."""

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from dialling import dial
from fakes import FakeEngine
from latentd import zmtp_door
from latentd.routing import Sent
from latentd.zmtp_holdings import PROGRESS_S
from latentd.zmtp_peer import TURN_FRAMES
from latentd.zmtp_router import ZmtpRouter
from latentd_client import Client, zmtp
from latentd_client.zmtp import GREETING, MORE, command, frame, message, ready
from serving import Peer, seat, serving
from wire_peers import (
    DEALER_READY,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    await_message,
    connect,
    greeted,
    has_ended,
    is_closed,
    num_descriptors,
    pass_time,
    run,
    run_awake,
    run_until,
    shaken,
)


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        yield dealer


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize(
    "frames",
    [
        [b""], [b"x"], [b"a" * 255], [b"b" * 256], [b"header", b"", b"c" * 70_000],
        [os.urandom(3_000_000), b"tail"], [b"%d" % i for i in range(MAX_FRAMES)],
    ],
    ids=lambda frames: f"{len(frames)} frames of {sum(map(len, frames))} bytes",
)  # fmt: skip
def test_messages_of_every_size_travel_both_ways(
    where: str, router: ZmtpRouter, dealer: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    dealer.connect(where)
    dealer.send_multipart(frames)
    peer, received, count = await_message(router)
    assert (received, count) == (frames, len(frames))
    assert router.try_send(peer, list(received)) is Sent.YES
    assert router.try_send(peer, [b"next"]) is Sent.YES
    while not dealer.poll(1):
        router.receive()  # what did not fit leaves meanwhile
    assert dealer.recv_multipart() == frames
    assert dealer.recv_multipart() == [b"next"]


def test_a_heartbeat_of_libzmq_is_answered(
    where: str, router: ZmtpRouter, dealer: zmq.Socket[bytes]
) -> None:
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 20)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1500)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(where)
    dealer.send(b"first")
    assert await_message(router)[1] == [b"first"]
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        router.sleep(10)
        assert router.receive() is None
    assert not monitor.poll(0)  # silence would have ended the connection after 1.5 s
    dealer.disable_monitor()
    monitor.close()


def test_what_arrives_byte_by_byte_is_put_together(where: str, router: ZmtpRouter) -> None:
    sock = connect(where, router, b"")
    data = GREETING + DEALER_READY + frame(b"head", MORE) + frame(b"z" * 300) + frame(b"last")
    received = []
    for byte in data:
        sock.sendall(bytes((byte,)))
        received += [frames for _, frames, _ in run(router, 2)]
    assert received == [[b"head", b"z" * 300], [b"last"]]
    sock.close()


def test_a_handshake_and_requests_may_come_in_one_piece(where: str, router: ZmtpRouter) -> None:
    hello = GREETING + DEALER_READY + frame(b"one") + frame(b"two")
    sock = dial(where)
    sock.sendall(hello)
    assert [frames for _, frames, _ in run(router)] == [[b"one"], [b"two"]]
    sock.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        bytes(64),
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING + ready(b"SUB"),
        GREETING + command(b"READY", b"\xffSocket"),
        GREETING + command(b"ERROR", b"\x02no"),
        GREETING + frame(b"too early"),
        GREETING + DEALER_READY + b"\x10\x01x",
        GREETING + DEALER_READY + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        GREETING + DEALER_READY + command(b"ERROR", b"\x02no"),
    ],
    ids=[
        "http", "ones", "zeros", "version 1", "curve", "sub", "torn ready", "error", "early",
        "flags", "size", "late error",
    ],
)  # fmt: skip
def test_who_speaks_something_else_only_loses_its_connection(
    where: str, router: ZmtpRouter, hello: bytes
) -> None:
    good = shaken(where, router)
    bad = connect(where, router, hello)
    assert not run_until(router, lambda: has_ended(bad))
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    good.close()
    bad.close()


def test_who_does_not_shake_hands_in_time_is_let_go(where: str, router: ZmtpRouter) -> None:
    silent, halfway, good = (
        connect(where, router, hello) for hello in (b"", GREETING, GREETING + DEALER_READY)
    )
    pass_time(router, int(PROGRESS_S / 2))
    assert len(router._peers) == 3
    pass_time(router, int(PROGRESS_S / 2) + 1)
    assert [is_closed(sock) for sock in (silent, halfway)] == [True, True]
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    for sock in (silent, halfway, good):
        sock.close()


def test_frames_beyond_the_limit_are_counted_and_not_kept(where: str, router: ZmtpRouter) -> None:
    sock = shaken(where, router)
    for _ in range(40):
        sock.sendall(frame(b"", MORE) * 100)
        assert not run(router, 2)
    sock.sendall(frame(b"end"))
    _, frames, count = await_message(router)
    assert (len(frames), count) == (MAX_FRAMES, 4001)
    sock.sendall(frame(b"next"))
    assert await_message(router)[1:] == ([b"next"], 1)
    sock.close()


@pytest.mark.parametrize("step", ["feed", "next"])
def test_a_message_that_memory_has_no_room_for_only_costs_its_sender_the_connection(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    modest, name = greeted(where, router)
    greedy, _ = greeted(where, router)
    real = getattr(zmtp.FrameReader, step)

    def limited(reader: zmtp.FrameReader, *args: Any) -> Any:
        if reader.held_bytes + sum(len(data) for data in args if step == "feed") > 5000:
            raise MemoryError
        return real(reader, *args)

    monkeypatch.setattr(zmtp.FrameReader, step, limited)
    with modest, greedy:
        greedy.sendall(frame(bytes(9000)))
        assert run(router) == []
        assert is_closed(greedy)
        modest.sendall(frame(bytes(1000)))
        assert await_message(router)[:2] == (name, [bytes(1000)])


def test_a_flood_does_not_keep_others_waiting(where: str, router: ZmtpRouter) -> None:
    flood, other = shaken(where, router), shaken(where, router)
    flood.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            flood.send(frame(b"f") * 1000)
    assert await_message(router)[1] == [b"f"]
    other.sendall(frame(b"o"))
    assert [b"o"] in [frames for _, frames, _ in run(router, 3)]
    flood.close()
    other.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_peer_that_has_gone_is_dead_and_its_last_words_are_read(
    where: str, router: ZmtpRouter
) -> None:
    sock = shaken(where, router)
    sock.sendall(frame(b"last words"))
    sock.close()
    peer, frames, _ = await_message(router)
    assert frames == [b"last words"]
    run_until(router, lambda: not router._peers)
    assert router.try_send(peer, [b"x"]) is Sent.DEAD
    assert not router._by_fd


def test_a_send_finds_out_that_the_peer_has_gone(where: str, router: ZmtpRouter) -> None:
    sock = shaken(where, router)
    sock.sendall(frame(b"hello") + frame(b"again"))
    peer = await_message(router)[0]
    sock.close()
    assert router.try_send(peer, [b"x"]) is Sent.DEAD
    run(router)
    assert not router._peers


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_what_is_queued_leaves_before_the_end(where: str, router: ZmtpRouter) -> None:
    sock, peer = greeted(where, router)
    assert router.try_send(peer, [bytes(20_000_000)]) is Sent.YES
    assert router._peers[peer].has_queue
    received = bytearray()

    def read() -> None:
        while part := sock.recv(1 << 20):
            received.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    router.close(5000)
    reader.join(60)
    assert received == message([bytes(20_000_000)])
    sock.close()


def test_who_left_before_its_turn_came_leaves_no_descriptor(where: str, router: ZmtpRouter) -> None:
    before = num_descriptors()
    for _ in range(100):
        dial(where).close()
    run(router, 20)
    assert num_descriptors() == before
    assert not router.look()


def test_a_flood_of_connections_does_not_keep_a_step_waiting(
    where: str, router: ZmtpRouter
) -> None:
    peer = shaken(where, router)
    crowd = [dial(where) for _ in range(8 * zmtp_door.ACCEPTS)]
    before = num_descriptors()
    router.receive()
    assert num_descriptors() - before <= zmtp_door.ACCEPTS
    peer.sendall(frame(b"step"))
    assert [frames for _, frames, _ in run(router, 2)] == [[b"step"]]
    for sock in crowd:  # who came later is served all the same
        sock.sendall(GREETING + DEALER_READY + frame(b"ping"))
    pings = run_awake(router, len(crowd) * 4)
    assert [frames for _, frames, _ in pings] == [[b"ping"]] * len(crowd)
    for sock in (peer, *crowd):
        sock.close()


def test_peers_leave_descriptors_to_the_control_socket(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(zmtp_door, "RESERVE", limit - 2 * zmtp_door.SHARE)  # two may come
    first, second = shaken(where, router), shaken(where, router)
    third = connect(where, router)
    third.settimeout(0.1)
    with pytest.raises(TimeoutError):
        third.recv(1)
    assert not router.look()  # it does not spin on the one that waits
    first.close()
    run(router)
    pass_time(router, 0)
    run(router)
    assert third.recv(64, socket.MSG_WAITALL) == GREETING
    for sock in (second, third):
        sock.close()


@pytest.mark.parametrize(
    "data",
    [
        command(b"PING", bytes(zmtp.MAX_COMMAND_BYTES)),
        command(b"PING", b"\0\0") * (zmtp.MAX_COMMANDS + 1),
        frame(b"", MORE) * (zmtp.MAX_MESSAGE_FRAMES + 1),
    ],
    ids=["a long command", "commands without end", "frames without end"],
)
def test_what_costs_the_daemon_time_without_a_message_ends_the_connection(
    where: str, router: ZmtpRouter, data: bytes
) -> None:
    bad = shaken(where, router)
    bad.sendall(data)
    assert not run_awake(router, 2 * zmtp.MAX_MESSAGE_FRAMES // TURN_FRAMES)
    assert is_closed(bad)
    bad.close()


def test_without_descriptors_a_client_waits_and_the_others_are_served(
    where: str, router: ZmtpRouter, caplog: pytest.LogCaptureFixture
) -> None:
    good = shaken(where, router)
    waits = dial(where, 5)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (waits.fileno() + 1, limits[1]))
    try:
        run(router)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not router.look()  # it does not spin on the one that waits
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    pass_time(router, 0)
    run(router, 2)
    assert waits.recv(64, socket.MSG_WAITALL) == GREETING
    good.close()
    waits.close()


def test_a_wake_up_ends_a_sleep(router: ZmtpRouter) -> None:
    waker, wakee = socket.socketpair()
    router.watch(wakee)
    waker.send(b"x")
    start = time.monotonic()
    router.sleep(5000)
    assert time.monotonic() - start < 4
    assert router.receive() is None
    assert not router.look()
    waker.close()
    wakee.close()


def test_a_daemon_serves_clients_of_both_kinds_and_survives_their_deaths(endpoint: str) -> None:
    engine = FakeEngine()
    with serving(endpoint, engine) as running:
        for _ in range(3):
            with Client(endpoint) as ours, Peer(endpoint) as theirs:
                slot, opened = ours.open([1, 2, 3]), theirs.hello().open()
                assert slot.step().context_len == 4
                assert theirs.ask("step", **seat(opened))["context_len"] == 4
        assert isinstance(running.server._listener.router, ZmtpRouter)  # type: ignore[union-attr]
