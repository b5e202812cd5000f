"""What a flood does not keep the engine from: messages, frames, connections, control requests."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dialling import dial
from fakes import FakeEngine
from gates import Gate, wait_until
from latentd import intake, requests, zmtp_peer, zmtp_rests
from latentd.zmtp_router import ZmtpRouter
from latentd_client import Client, protocol, zmtp
from latentd_client.zmtp import MORE, command, frame
from raw_peers import RawPeer
from serving import Peer, seat, serving
from wire_peers import MAX_FRAME_BYTES, MAX_FRAMES, greeted, num_descriptors, run, run_awake, shaken

TOKENS, PINGS, PEERS = 300, 200, 40


def test_while_somebody_decodes_a_turn_answers_few_who_give_the_engine_nothing_to_do(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "SPARE_SHARE", 0.0)
    engine = FakeEngine()
    answered: Counter[int] = Counter()  # by how many launches there had been

    def handle(work: Any, peer: bytes, message: Any, num_frames: int) -> None:
        answered[engine.fake.launches] += 1
        requests.handle(work, peer, message, num_frames)

    with serving(endpoint, engine) as running, Peer(endpoint) as decoding:
        crowd = [RawPeer(endpoint.removeprefix("ipc://")) for _ in range(PEERS)]
        gate = Gate(engine)
        slot = seat(decoding.hello().open())
        gate.shut()
        decoding.send("stream", **slot, max_steps=TOKENS, credit=TOKENS)
        wait_until(lambda: bool(running.engine.launches.in_flight))
        pings = [protocol.encode({"v": 1, "id": i, "op": "ping"}) for i in range(PINGS // PEERS)]
        for peer in crowd:
            peer.send(pings)
        monkeypatch.setattr(intake, "requests", SimpleNamespace(handle=handle))
        gate.open()
        for peer in crowd:
            assert {reply["status"] for reply in peer.settle()} == {"ok"}
            peer.close()
    del answered[engine.fake.launches]  # nobody decoded any more
    assert set(answered.values()) <= {1, 2}, "a turn is in front of a launch or behind one"
    assert answered


def test_with_nothing_in_flight_a_turn_answers_as_many_as_there_are(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "SPARE_SHARE", 0.0)
    with serving(endpoint) as running, Client(endpoint) as client:
        client.open([1, 2, 3]).step()
        time.sleep(2 * intake.DECODING_S)
        take = mock.Mock(side_effect=running.server._intake.take)
        monkeypatch.setattr(running.server._intake, "take", take)
        peer = RawPeer(endpoint)
        peer.send([protocol.encode({"v": 1, "id": i, "op": "ping"}) for i in range(PINGS)])
        peer.settle()
        peer.close()
        assert take.call_count < PINGS // 4


def test_who_floods_while_somebody_decodes_rests_and_who_steps_does_not(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "SPARE_SHARE", 0.0)
    with serving(endpoint) as running, Client(endpoint) as client, Peer(endpoint) as peer:
        slot = client.open([1, 2, 3])
        slot.step()
        router: Any = running.server._listener.router  # type: ignore[union-attr]
        rest = mock.Mock(wraps=router.rest)
        monkeypatch.setattr(router, "rest", rest)
        for _ in range(50):
            peer.send("ping")
            slot.step()
        for _ in range(50):
            assert peer.receive()[0]["status"] == "ok"
        stepping = running.server._work.sessions.peers()
        resting = {call.args[0] for call in rest.call_args_list}
        assert len(stepping) == len(resting) == 1
        assert resting.isdisjoint(stepping)


@pytest.mark.parametrize(
    ("tiny", "count"),
    [(frame(b"", MORE), 5000), (command(b"PING", b"\0\0"), zmtp.MAX_COMMANDS)],
    ids=["frames", "commands"],
)
def test_many_tiny_frames_in_one_read_are_looked_at_a_few_a_turn(
    where: str, router: ZmtpRouter, tiny: bytes, count: int
) -> None:
    flood, peer = shaken(where, router), shaken(where, router)
    flood.sendall(tiny * count + frame(b"end"))
    peer.sendall(frame(b"step"))
    assert [frames for _, frames, _ in run(router, 2)] == [[b"step"]]
    reader = next(iter(router._rests._until))._reader
    before = len(reader._unread) - reader._at
    assert not run_awake(router, 1)
    after = len(reader._unread) - reader._at
    assert 0 < before - after <= zmtp_peer.TURN_FRAMES * len(tiny)
    ((_, _, num_frames),) = run_awake(router, count)
    assert num_frames == (count + 1 if tiny == frame(b"", MORE) else 1)
    for sock in (flood, peer):
        sock.close()


def test_a_reader_says_when_it_has_not_looked_at_all() -> None:
    reader = zmtp.FrameReader(MAX_FRAME_BYTES, MAX_FRAMES, MAX_FRAME_BYTES)
    reader.feed(memoryview(frame(b"a", MORE) * 3 + frame(b"b")))
    assert (reader.next(3), reader.is_cut) == (None, True)
    assert (reader.next(3), reader.is_cut) == ([b"a"] * 3 + [b"b"], False)
    assert (reader.next(3), reader.is_cut) == (None, False)


def test_a_peer_that_rests_is_read_when_its_time_is_over_or_when_nobody_else_is_there(
    where: str, router: ZmtpRouter
) -> None:
    sock, name = greeted(where, router)
    router.rest(name, 60.0)
    sock.sendall(frame(b"one") + frame(b"two"))
    assert not run(router, 3)
    router.rest(name, 0.0)
    assert [frames for _, frames, _ in run(router, 2)] == [[b"one"], [b"two"]]
    router.rest(name, 60.0)
    sock.sendall(frame(b"three"))
    assert not router.look()
    assert [frames for _, frames, _ in run_awake(router, 1)] == [[b"three"]]
    router.rest(name, 0.01)
    sock.close()
    run_awake(router, 2)
    assert not router._peers
    assert not router._rests.are_there


def test_connections_are_taken_as_long_as_there_is_time(
    where: str, router: ZmtpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp_rests, "DOOR_S", 60.0)
    crowd = [dial(where) for _ in range(10)]
    before = num_descriptors()
    router.spare_s = 0.0
    router.receive()
    assert num_descriptors() - before == 1
    router.spare_s = 1.0
    assert not run(router, 2)
    assert num_descriptors() - before == 1  # they wait for a moment
    run_awake(router, 1)
    assert num_descriptors() - before == 10
    for sock in crowd:
        sock.close()
