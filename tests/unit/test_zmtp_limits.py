"""What the daemon's own ROUTER lets its peers cost: bytes, time, descriptors, unread replies."""

import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zmq

from dialling import dial
from fakes import FakeEngine
from gates import Gate, wait_until
from latentd import (
    control,
    intake,
    parking,
    runs,
    zmq_router,
    zmtp_door,
    zmtp_holdings,
    zmtp_peer,
    zmtp_router,
)
from latentd.routing import SEND_QUEUE, Message, Sent
from latentd.zmtp_holdings import PROGRESS_S
from latentd.zmtp_router import ZmtpRouter
from latentd_client import Client, protocol, zmtp
from latentd_client.zmtp import GREETING, MORE, command, frame, message, ready
from serving import Peer, arriving, seat, serving
from wire_peers import (
    DEALER_READY,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    await_message,
    connect,
    greeted,
    is_closed,
    pass_time,
    run,
    run_until,
    shaken,
)

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + protocol.MAX_HEADER_BYTES


def send_all(router: ZmtpRouter, sock: socket.socket, data: bytes) -> list[list[bytes]]:
    """Send much to a router of this thread; the messages that it makes of it."""
    sock.setblocking(False)
    view, received = memoryview(data), []
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            received += [frames for _, frames, _ in run(router, 1)]
        except OSError:
            break
    sock.settimeout(5)
    return received + [frames for _, frames, _ in run(router, 20)]


def long_frame(size: int, flags: int = 0) -> bytes:
    """The head of a frame whose body has still to come."""
    return bytes((flags | zmtp.LONG,)) + size.to_bytes(8, "big")


def test_the_protocol_page_names_the_bounds_that_the_code_has() -> None:
    page = Path(__file__).parents[2].joinpath("docs/protocol.md").read_text()
    kib, mib = 1 << 10, 1 << 20
    for bound in (
        f"{PROGRESS_S:.0f} s, READY of {zmtp.MAX_COMMAND_BYTES // kib} KiB",
        f"`max_frame_bytes`; {control.MAX_REQUEST_BYTES // kib} KiB on the control socket",
        f"+ {protocol.MAX_HEADER_BYTES // mib} MiB in all its frames, "
        f"{zmtp.MAX_MESSAGE_FRAMES:,} frames",
        f"{zmtp.MAX_COMMAND_BYTES // kib} KiB, {zmtp.MAX_COMMANDS} of them at once",
        f"{PROGRESS_S:.0f} s without a further byte",
        f"{SEND_QUEUE}, or {zmtp_peer.QUEUED_BYTES // mib} MiB",
        f"wait for one operation in flight | {runs.MAX_WAITERS} |",
        f"{zmtp_holdings.HELD_BYTES // mib} MiB a socket",
        f"limit of open files less {zmtp_door.RESERVE}",
        f"beyond {SEND_QUEUE + parking.MAX_PARKED} are dropped",
        f"beyond {zmq_router.MAX_QUEUED_BYTES // mib} MiB of large ones",
        f"and {parking.MAX_PARKED_BYTES // mib} MiB of any kind",
    ):
        assert bound in page.replace("\n", " ")


def test_a_message_is_bounded_as_a_whole_and_not_only_frame_by_frame(
    where: str, router: ZmtpRouter
) -> None:
    good, bad = shaken(where, router), shaken(where, router)
    header, body = bytes(protocol.MAX_HEADER_BYTES), bytes(MAX_FRAME_BYTES)
    assert send_all(router, good, message([header, body])) == [[header, body]]
    assert not send_all(router, bad, message([header, body, b"x"]))
    assert is_closed(bad)
    assert router._crowd._holdings._total == 0
    for sock in (good, bad):
        sock.close()


def test_a_large_message_leaves_nothing_behind(where: str, router: ZmtpRouter) -> None:
    sock = shaken(where, router)
    assert len(send_all(router, sock, frame(bytes(MAX_FRAME_BYTES)) + frame(b"next"))) == 2
    peer = next(iter(router._peers.values()))
    assert (peer.held_bytes, len(peer._reader._unread)) == (0, 0)
    sock.close()


@pytest.mark.parametrize(
    "hello",
    [
        GREETING + long_frame(MAX_FRAME_BYTES),
        GREETING + long_frame(zmtp.MAX_COMMAND_BYTES + 1, zmtp.COMMAND),
        GREETING + b"\x01",
        GREETING + command(b"PING", b"\0\0"),
        GREETING + b"\x04\x00",
    ],
    ids=["a message", "a long READY", "a frame with more", "a heartbeat", "an empty command"],
)
def test_before_the_handshake_ended_a_peer_is_worth_4_kib(
    where: str, router: ZmtpRouter, hello: bytes
) -> None:
    bad = connect(where, router, hello + bytes(1000) if hello[-1] else hello)
    assert not run(router)
    assert is_closed(bad)
    bad.close()


def test_all_connections_share_one_budget_and_who_holds_most_for_longest_goes(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(zmtp_holdings, "HELD_BYTES", 4 << 20)
    crowd = [shaken(where, router) for _ in range(40)]
    for sock in crowd[:3]:
        send_all(router, sock, long_frame(MAX_FRAME_BYTES) + bytes(1_000_000))
    pass_time(router, 3)
    good = shaken(where, router)  # its message is larger than what any other holds
    body = os.urandom(3_000_000)
    assert send_all(router, good, frame(body)) == [[body]]
    for sock in crowd[3:]:
        send_all(router, sock, long_frame(MAX_FRAME_BYTES) + bytes(200_000))
        assert router._crowd._holdings._total <= 4 << 20
    pass_time(router, 1)
    assert send_all(router, good, frame(body)) == [[body]]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is closed" in caplog.text
    for sock in (good, *crowd):
        sock.close()


def test_long_messages_of_a_crowd_do_not_keep_a_short_one_waiting(
    where: str, router: ZmtpRouter
) -> None:
    crowd, good = [shaken(where, router) for _ in range(40)], shaken(where, router)
    half = long_frame(1_000_000) + bytes(zmtp_router.CHUNK_BYTES)
    for sock in crowd:
        send_all(router, sock, half)
    for sock in crowd:
        sock.sendall(bytes(100_000))
    good.sendall(frame(b"short"))
    before = {peer: peer.unfinished for peer in router._peers.values()}
    assert router.receive() == (mock.ANY, [b"short"], 1)
    assert sum(peer.unfinished > had for peer, had in before.items()) == zmtp_router.BULK
    rest = bytes(1_000_000 - zmtp_router.CHUNK_BYTES - 100_000)
    messages = [frames for sock in crowd for frames in send_all(router, sock, rest)]
    messages += [frames for _, frames, _ in run(router, 200)]
    assert messages == [[bytes(1_000_000)]] * 40
    for sock in (good, *crowd):
        sock.close()


def test_who_goes_in_the_middle_of_a_turn_is_not_read_in_it(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp_holdings, "HELD_BYTES", 1 << 20)
    crowd, good = [shaken(where, router) for _ in range(12)], shaken(where, router)
    for sock in crowd:
        send_all(router, sock, long_frame(1_000_000) + bytes(80_000))
    pass_time(router, 1)  # so that those go first who were not read yet
    for sock in crowd:
        sock.sendall(bytes(100_000))  # together 2 MB
    run(router, 10)
    assert router._crowd._holdings._total <= 1 << 20
    assert 0 < len(router._peers) - 1 < 12
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    for sock in (good, *crowd):
        sock.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_message_that_does_not_go_on_ends_the_connection(where: str, router: ZmtpRouter) -> None:
    starts = [long_frame(1000), b"\x01", frame(b"head", MORE), b"\x04\x20half a command"]
    stuck = [shaken(where, router) for _ in starts]
    idle = shaken(where, router)
    for sock, start in zip(stuck, starts, strict=True):
        sock.sendall(start)
    run_until(router, lambda: sum(bool(one.unfinished) for one in router._peers.values()) == 4)
    pass_time(router, int(PROGRESS_S) - 1)
    assert len(router._peers) == 5
    pass_time(router, 3)
    assert [is_closed(sock) for sock in stuck] == [True] * 4
    idle.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    for sock in (*stuck, idle):
        sock.close()


def test_a_slow_sender_has_all_the_time_it_needs(where: str, router: ZmtpRouter) -> None:
    slow = shaken(where, router)
    slow.sendall(frame(b"", MORE) * 20 + b"\0\x05")
    for byte in b"slow":
        pass_time(router, int(PROGRESS_S) - 1)
        slow.sendall(bytes((byte,)))
    pass_time(router, int(PROGRESS_S) - 1)
    slow.sendall(b".")
    assert await_message(router)[1:] == ([b""] * MAX_FRAMES, 21)
    slow.close()


def test_nobody_is_late_while_the_daemon_does_not_look(where: str, router: ZmtpRouter) -> None:
    slow = shaken(where, router)
    slow.sendall(long_frame(4))
    pass_time(router, 1)
    shaking = connect(where, router, GREETING)
    router.tick(5000.0, frozenset)  # an hour later
    slow.sendall(b"done")
    shaking.sendall(DEALER_READY + frame(b"too"))
    assert sorted(frames for _, frames, _ in run(router)) == [[b"done"], [b"too"]]
    slow.close()
    shaking.close()


def test_a_peer_whose_queue_is_full_is_not_read_until_it_has_taken_its_replies(
    where: str, router: ZmtpRouter
) -> None:
    sock, peer = greeted(where, router)
    body = os.urandom(10_000)
    sent = 0
    while not router._peers[peer].is_paused:
        assert router.try_send(peer, [body]) is Sent.YES
        sent += 1
    for _ in range(100):  # replies to what was asked before: there is room
        assert router.try_send(peer, [body]) is Sent.YES
    sock.sendall(frame(b"more") * 3)
    assert not run(router)
    assert not router.look()  # and it does not spin on what waits
    left = (sent + 100) * len(message([body]))
    received: list[Message] = []
    while left or len(received) < 3:
        left -= len(sock.recv(1 << 20)) if left else 0
        received += run(router, 1)
    assert [frames for _, frames, _ in received] == [[b"more"]] * 3
    assert not router._peers[peer].has_queue
    sock.close()


def test_what_a_peer_asked_before_its_queue_was_full_is_read_later(
    where: str, router: ZmtpRouter
) -> None:
    sock, peer = greeted(where, router)
    sock.sendall(b"".join(frame(b"%d" % i) for i in range(5)))
    received = [await_message(router)[1]]
    sent = 0
    while not router._peers[peer].is_paused:
        router.try_send(peer, [bytes(100_000)])
        sent += 1
    assert not run(router)  # the other four lie in the reader
    assert not router.look()
    left = sent * len(message([bytes(100_000)]))
    while left:
        left -= len(sock.recv(1 << 20))
        received += [frames for _, frames, _ in run(router, 1)]
    received += [frames for _, frames, _ in run(router)]
    assert received == [[b"%d" % i] for i in range(5)]
    sock.close()


def test_a_peer_that_reads_again_need_not_send_anything_to_be_served(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, peer = greeted(where, router)
    sock.sendall(frame(b"first") + frame(b"second"))
    assert await_message(router)[1] == [b"first"]
    while not router._peers[peer].is_paused:
        router.try_send(peer, [bytes(100_000)])
    assert not run(router)
    while not router._busy:  # until its queue is no longer full
        sock.recv(1 << 20)
        assert router.receive() is None
    poll = mock.Mock(return_value=[])
    monkeypatch.setattr(router, "_poll", poll)
    router.sleep(10_000)
    poll.assert_not_called()
    assert router.receive() == (peer, [b"second"], 1)
    sock.close()


def test_a_full_queue_is_also_one_of_many_bytes(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp_peer, "QUEUED_BYTES", 1 << 20)
    sock, peer = greeted(where, router)
    for _ in range(4):
        assert router.try_send(peer, [bytes(1 << 19)]) is Sent.YES
    assert router._peers[peer].is_paused
    assert not router.has_room(peer)
    sock.close()


def test_streams_alone_do_not_keep_a_peer_from_being_read(where: str, router: ZmtpRouter) -> None:
    sock, peer = greeted(where, router)
    while router.has_room(peer):
        router.try_send(peer, [bytes(10_000)])
    sock.sendall(frame(b"cancel"))
    assert await_message(router)[1] == [b"cancel"]
    sock.close()


def test_heartbeats_that_nobody_reads_the_answers_of_are_not_read(
    where: str, router: ZmtpRouter
) -> None:
    sock, name = greeted(where, router)
    peer = router._peers[name]
    pings = command(b"PING", b"\0\0" + bytes(4000)) * 8
    sock.setblocking(False)
    end = time.monotonic() + 10
    while not peer.is_paused and time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            sock.send(pings)
        run(router, 2)
    assert peer.is_paused
    assert peer.held_bytes < (SEND_QUEUE + zmtp.MAX_COMMANDS + 16) * 4096
    sock.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_peer_that_is_not_read_is_let_go_when_it_dies(where: str, router: ZmtpRouter) -> None:
    sock, peer = greeted(where, router)
    sock.sendall(frame(b"a") + frame(b"b"))
    await_message(router)
    while not router._peers[peer].is_paused:
        router.try_send(peer, [bytes(100_000)])
    sock.close()
    run_until(router, lambda: not router._peers)
    assert not router._crowd._holdings._total
    assert not router.look()


def test_a_peer_that_is_not_read_cannot_be_late(where: str, router: ZmtpRouter) -> None:
    sock, peer = greeted(where, router)
    sock.sendall(long_frame(4))
    run(router)
    sent = 0
    while not router._peers[peer].is_paused:
        router.try_send(peer, [bytes(100_000)])
        sent += 1
    pass_time(router, 2 * int(PROGRESS_S))
    sock.sendall(b"late")
    left = sent * len(message([bytes(100_000)]))
    received = []
    while left:
        left -= len(sock.recv(1 << 20))
        received += pass_time(router, 0)
    assert [frames for _, frames, _ in received + run(router)] == [[b"late"]]
    sock.close()


def test_when_descriptors_run_short_who_has_no_session_gives_way(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(zmtp_door, "RESERVE", limit - 3 * zmtp_door.SHARE)  # three may come
    owner, name = greeted(where, router)
    idle = [shaken(where, router) for _ in range(2)]
    pass_time(router, 10 * int(PROGRESS_S), {name})
    assert len(router._peers) == 3  # there is room: nobody is closed for being idle
    waits = connect(where, router)
    pass_time(router, 1, {name})
    assert waits.recv(64, socket.MSG_WAITALL) == GREETING
    assert [is_closed(sock) for sock in idle] == [True, True]
    fresh = shaken(where, router)
    late = connect(where, router)
    pass_time(router, 1, {name})
    late.settimeout(0.1)
    with pytest.raises(TimeoutError):  # the others have not had their 30 s yet
        late.recv(1)
    fresh.sendall(frame(b"fresh"))
    owner.sendall(frame(b"owner"))
    assert sorted(frames for _, frames, _ in run(router)) == [[b"fresh"], [b"owner"]]
    for sock in (owner, waits, fresh, late, *idle):
        sock.close()


def test_a_peer_that_asks_for_another_mechanism_is_told_that_and_nothing_of_sockets(
    where: str, router: ZmtpRouter
) -> None:
    sock = connect(where, router, GREETING.replace(b"NULL\0", b"CURVE"))
    assert sock.recv(1000).endswith(zmtp.error("asks for the mechanism CURVE, not NULL"))
    sock.close()


def test_a_req_socket_is_refused_by_name_as_its_replies_would_lack_a_delimiter(
    where: str, router: ZmtpRouter, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        sock = connect(where, router, GREETING + ready(b"REQ"))
        said = sock.recv(1000)
        assert said.endswith(zmtp.error("is a REQ socket; use a DEALER"))
        assert is_closed(sock)
        sock.close()
    assert [record.getMessage() for record in caplog.records] == [
        "a connection was refused: the peer is a REQ socket; use a DEALER"
    ]


def test_a_req_of_libzmq_harms_nobody(where: str, router: ZmtpRouter) -> None:
    good = shaken(where, router)
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.setsockopt(zmq.LINGER, 0)
        req.connect(where)
        req.send(b"question", zmq.NOBLOCK)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            router.sleep(10)
            assert router.receive() is None
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    good.close()


def test_thousands_of_requests_sent_before_the_first_reply_is_read_all_get_theirs(
    endpoint: str,
) -> None:
    count = 5000
    pings = [protocol.encode({"v": 1, "id": i, "op": "ping"}) for i in range(count)]
    pings_bytes = b"".join(message(ping) for ping in pings)
    reader = zmtp.FrameReader(1000, 1, 1000)
    ids: list[int] = []
    with (
        serving(endpoint) as running, Client(endpoint) as other, dial(endpoint) as sock,
    ):  # fmt: skip
        router: Any = running.server._listener.router  # type: ignore[union-attr]
        slot = other.open([1, 2, 3])
        sender = threading.Thread(
            target=sock.sendall, args=(GREETING + DEALER_READY + pings_bytes,)
        )
        sender.start()
        wait_until(lambda: any(peer.is_paused for peer in list(router._peers.values())))
        for _ in range(50):
            slot.step()
        assert len(sock.recv(64, socket.MSG_WAITALL)) == 64
        while len(ids) < count:
            reader.feed(memoryview(sock.recv(1 << 16)))
            while (frames := reader.next()) is not None:
                ids.append(protocol.decode_header(frames[0])["id"])
        sender.join()
        assert ids == list(range(count))
        assert not other.stats()["server"].get("replies_dropped")
        assert router._crowd._holdings._total == 0


def test_a_row_in_flight_is_waited_for_by_so_many_requests_and_others_are_busy(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TAKE_S", "SPARE_SHARE"):  # all of them come in front of one launch
        monkeypatch.setattr(intake, name, 600.0)
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine) as running, Peer(endpoint) as peer:
        opened, blocker = peer.hello().open(key="a"), peer.open(key="b")
        gate.shut()
        peer.send("step", **seat(blocker))
        with arriving(running, peer):
            for _ in range(40):
                peer.send("step", **seat(opened))
        gate.open()
        statuses = [peer.receive()[0]["status"] for _ in range(41)]
        assert (statuses.count("ok"), statuses.count("busy")) == (17, 24)


def test_repeats_of_an_ended_stream_leave_one_reader_of_it(endpoint: str) -> None:
    with serving(endpoint, credits=2000) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        request = {**seat(opened), "max_steps": 500, "credit": 2000}
        peer.send("stream", **request)
        while peer.receive()[0].get("more"):
            pass
        outbox: Any = running.server._outbox
        room, outbox._has_room = outbox._has_room, lambda name: False
        for _ in range(100):
            last = peer.send("stream", **request)
        ping = peer.send("ping")
        dismissed = [peer.receive()[0] for _ in range(99)]
        assert {reply["status"] for reply in dismissed} == {"cancelled"}
        assert [reply["id"] for reply in dismissed] == list(range(last - 99, last))
        assert peer.receive()[0]["id"] == ping
        assert len(running.server._work.undelivered) == 1
        outbox._has_room = room
        header, _ = peer.receive()
        assert (header["id"], header["replayed"], len(header["tokens"])) == (last, True, 500)


def test_the_control_socket_has_the_same_limits(endpoint: str) -> None:
    with serving(endpoint) as running, Client(endpoint) as client:
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            GREETING + ready(b"REQ"),
            GREETING + DEALER_READY + long_frame(1 << 20),
            GREETING + DEALER_READY + frame(bytes(4000), MORE) * 400,
            GREETING + DEALER_READY + frame(b"", MORE) * (zmtp.MAX_MESSAGE_FRAMES + 1),
        ):
            # many tiny frames are looked at a few at a time, with rests
            with dial(running.server.control_endpoint, 60) as sock:
                try:
                    sock.sendall(data)
                except OSError:
                    continue
                assert is_closed(sock)
        assert client.health()["state"] == "ready"


def test_a_flood_of_control_requests_is_answered_with_rests_for_the_engine(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=rests.append)
    monkeypatch.setattr(control, "time", clock)
    with serving(endpoint) as running, Peer(running.server.control_endpoint) as peer:
        for _ in range(500):
            peer.send("health")
        assert {peer.receive()[0]["state"] for _ in range(500)} == {"ready"}
    assert rests.count(control.REST_S) == len(rests) > 3


def test_a_session_protects_the_connection_that_it_came_through_last(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as first, Peer(endpoint) as second:
        opened = first.hello().open()
        sessions = running.server._work.sessions
        before = sessions.peers()
        second.session = first.session
        assert second.ask("step", **seat(opened))["status"] == "ok"
        assert len(before) == len(sessions.peers()) == 1
        assert before != sessions.peers()
