"""What a flood does not keep the engine from: messages, frames, connections, control requests."""

import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fakes import FakeEngine
from latentd import server, zmtp_peer
from latentd.zmtp_router import ZmtpRouter
from latentd_client import Client, zmtp
from latentd_client.zmtp import MORE, command, frame
from serving import Peer, serving
from wire_peers import MAX_FRAME_BYTES, MAX_FRAMES, num_descriptors, run, shaken

TOKENS, PINGS = 300, 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def router(path: Path) -> Iterator[ZmtpRouter]:
    router = ZmtpRouter(MAX_FRAME_BYTES, MAX_FRAMES)
    router.bind(f"ipc://{path}")
    yield router
    router.close(0)


def test_while_somebody_decodes_a_turn_answers_few_who_give_the_engine_nothing_to_do(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SPARE_SHARE", 0.0)
    engine = FakeEngine()
    with serving(endpoint, engine), Client(endpoint) as client, Peer(endpoint) as peer:
        slot = client.open([1, 2, 3])
        tokens = slot.stream(TOKENS, credit=TOKENS)
        next(tokens)
        for _ in range(PINGS):
            peer.send("ping")
        assert peer.receive()[0]["status"] == "ok"
        before = engine.fake.launches
        left = PINGS - 1
        while engine.fake.launches < before + TOKENS // 4:
            assert peer.receive()[0]["status"] == "ok"
            left -= 1
        assert left > 0, "all were answered while a few tokens were decoded"
        assert len(list(tokens)) == TOKENS - 1
        for _ in range(left):
            assert peer.receive()[0]["status"] == "ok"


def test_with_nothing_in_flight_a_turn_answers_as_many_as_there_are(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SPARE_SHARE", 0.0)
    with serving(endpoint) as running, Client(endpoint) as client, Peer(endpoint) as peer:
        client.open([1, 2, 3]).step()
        take = mock.Mock(side_effect=running.server._take)
        monkeypatch.setattr(running.server, "_take", take)
        for _ in range(PINGS):
            peer.send("ping")
        for _ in range(PINGS):
            assert peer.receive()[0]["status"] == "ok"
        assert take.call_count < PINGS


@pytest.mark.parametrize(
    ("tiny", "count"),
    [(frame(b"", MORE), 5000), (command(b"PING", b"\0\0"), zmtp.MAX_COMMANDS)],
    ids=["frames", "commands"],
)
def test_many_tiny_frames_in_one_read_are_looked_at_a_few_a_turn(
    path: Path, router: ZmtpRouter, tiny: bytes, count: int
) -> None:
    flood, peer = shaken(path, router), shaken(path, router)
    flood.sendall(tiny * count + frame(b"end"))
    peer.sendall(frame(b"step"))
    assert [frames for _, frames, _ in run(router, 2)] == [[b"step"]]
    reader = next(iter(router._busy))._reader
    before = len(reader._unread) - reader._at
    assert not run(router, 1)
    after = len(reader._unread) - reader._at
    assert 0 < before - after <= zmtp_peer.TURN_FRAMES * len(tiny)
    ((_, _, num_frames),) = run(router, count)
    assert num_frames == (count + 1 if tiny == frame(b"", MORE) else 1)
    for sock in (flood, peer):
        sock.close()


def test_a_reader_says_when_it_has_not_looked_at_all() -> None:
    reader = zmtp.FrameReader(MAX_FRAME_BYTES, MAX_FRAMES, MAX_FRAME_BYTES)
    reader.feed(memoryview(frame(b"a", MORE) * 3 + frame(b"b")))
    assert (reader.next(3), reader.is_cut) == (None, True)
    assert (reader.next(3), reader.is_cut) == ([b"a"] * 3 + [b"b"], False)
    assert (reader.next(3), reader.is_cut) == (None, False)


def test_connections_are_taken_as_long_as_there_is_time(path: Path, router: ZmtpRouter) -> None:
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for sock in crowd:
        sock.connect(str(path))
    before = num_descriptors()
    router.spare_s = 0.0
    router.receive()
    assert num_descriptors() - before == 1
    router.spare_s = 1.0
    router.receive()
    assert num_descriptors() - before == 10
    for sock in crowd:
        sock.close()
