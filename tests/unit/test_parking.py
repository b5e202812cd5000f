"""Replies to peers of libzmq that do not read: bounded in bytes, and none is lost to who reads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import zmq

from curve_keys import ANYWHERE, Keys
from fakes import FakeEngine
from latentd import parking, zmq_router
from latentd.parking import MAX_PARKED, MAX_PARKED_BYTES, Parked
from latentd.replies import Outbox
from latentd.routing import Sent
from latentd.zmq_router import MAX_QUEUED_BYTES, ZmqRouter, make_router
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latentd.routing import Frames

MIB = 1 << 20


def test_what_is_parked_is_bounded_in_number_and_bytes_but_for_one() -> None:
    parked = Parked()
    assert parked.add([bytes(MAX_PARKED_BYTES + 1)])
    assert not parked.add([b"x"])
    parked.drop_first()
    assert not parked
    assert sum(parked.add([b"x"]) for _ in range(MAX_PARKED + 9)) == MAX_PARKED
    parked.drop_first()
    assert not parked.add([bytes(MAX_PARKED_BYTES)])
    assert parked.add([b"x"])


@pytest.fixture
def pair() -> Iterator[tuple[ZmqRouter, zmq.Socket[bytes], bytes]]:
    """A router on tcp, a DEALER that reads little ahead, and that one's name."""
    with zmq.Context() as context:
        socket = make_router(context, MAX_QUEUED_BYTES)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        socket.poll(10_000)
        router = ZmqRouter(socket, 16)
        message = router.receive()
        assert message is not None
        yield router, dealer, message[0]
        dealer.close()
        router.close(0)


def test_large_replies_are_queued_up_to_a_number_of_bytes_until_the_peer_reads(
    pair: tuple[ZmqRouter, zmq.Socket[bytes], bytes],
) -> None:
    router, dealer, peer = pair
    outbox, sent = Outbox(router), 0
    big: Frames = [b"head", bytes(7 * MIB)]
    while router.try_send(peer, big) is Sent.YES:
        sent += 1
        assert sent < 40
    assert sent * 7 * MIB <= MAX_QUEUED_BYTES + 32 * MIB  # and what the system has taken
    assert router.try_send(peer, [b"small"]) is Sent.YES
    for _ in range(5):
        outbox.deliver(peer, big)
    assert (outbox.is_parked(peer), outbox.counters["replies_dropped"]) == (True, 3)
    for _ in range(sent):
        assert dealer.recv_multipart() == big
    assert dealer.recv() == b"small"
    while outbox.has_parked:
        outbox.flush()
        with contextlib.suppress(zmq.Again):
            dealer.recv_multipart(zmq.NOBLOCK)
    assert router.try_send(peer, big) is Sent.YES


def test_a_reply_larger_than_the_bound_is_sent_alone(
    pair: tuple[ZmqRouter, zmq.Socket[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_router, "MAX_QUEUED_BYTES", MIB)
    router, dealer, peer = pair
    assert router.try_send(peer, [bytes(2 * MIB)]) is Sent.YES
    assert len(dealer.recv()) == 2 * MIB


def test_nothing_is_remembered_of_large_replies_that_have_left(
    pair: tuple[ZmqRouter, zmq.Socket[bytes], bytes],
) -> None:
    router, dealer, peer = pair
    assert router.try_send(peer, [bytes(MIB)]) is Sent.YES
    assert len(dealer.recv()) == MIB
    for _ in range(1000):
        router.tick(0.0, set)
        if not router._queued:
            return
        dealer.poll(1)
    raise AssertionError("it is still remembered")


def test_an_export_is_busy_while_replies_before_it_wait_for_their_reader(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_router, "MAX_QUEUED_BYTES", MIB)
    monkeypatch.setattr(parking, "MAX_PARKED_BYTES", 64 * MIB)
    engine = FakeEngine(layers=20)
    with (
        serving(ANYWHERE, engine, access=keys.options) as running,
        Peer(running.endpoint, 1, before_connect=keys.dress) as peer,
    ):
        opened = peer.hello().open([1] * 300)
        for _ in range(20):
            peer.send("export", **seat(opened), first=0, count=5)
        codes = [peer.receive()[0]["status"] for _ in range(20)]
    assert "ok" in codes
    assert set(codes) <= {"ok", "busy"}
    assert "busy" in codes
