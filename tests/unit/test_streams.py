"""Streams from outside: how they begin, stop, go on with another reader, and share launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine
from gates import Gate
from latentd import runs
from latentd_client import ConnectionLost, ProtocolError, RequestRejected
from serving import Peer, arriving, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable

    Connect = Callable[..., Any]

PROMPT = (1, 2, 3)


def tokens_of_steps(engine: FakeEngine, count: int, first: int | None = None) -> list[int]:
    """What `count` steps behind PROMPT yield, the first of which appends `first`."""
    tokens = [*PROMPT, engine.expected_token(PROMPT) if first is None else first]
    for _ in range(count):
        tokens.append(engine.expected_token(tokens))
    return tokens[len(PROMPT) + 1 :]


def read(peer: Peer) -> tuple[list[int], dict[str, Any]]:
    """All tokens up to the end of a stream, and its last frame."""
    tokens: list[int] = []
    while True:
        header, _ = peer.receive()
        assert header["status"] == "ok", header
        tokens += header["tokens"]
        if not header.get("more"):
            return tokens, header


def test_a_stop_sequence_ends_a_stream_after_its_last_token(
    connect: Connect, endpoint: str, engine: FakeEngine
) -> None:
    expected = tokens_of_steps(engine, 9)
    with serving(endpoint, engine), connect(endpoint) as client:
        slot = client.open(PROMPT)
        sequences = [[expected[8], expected[7]], np.array(expected[4:7]), [300]]
        found = [step.token for step in slot.stream(50, stop_sequences=sequences)]
        assert found == expected[:7]
        assert slot.context_len == len(PROMPT) + 7
        assert slot.step().token == expected[7]  # the last token was not appended


def test_tokens_before_a_stream_are_no_part_of_its_stop_sequences(
    peer: Peer, engine: FakeEngine
) -> None:
    opened, expected = peer.open(PROMPT), tokens_of_steps(engine, 6)
    peer.send("stream", **seat(opened), max_steps=2, credit=9)
    read(peer)
    sequences = [expected[1:3], expected[3:5]]
    at = {**seat(opened), "pos": len(PROMPT) + 2}
    peer.send("stream", **at, max_steps=9, credit=9, stop_sequences=sequences)
    tokens, last = read(peer)
    assert (tokens, last["end"]) == (expected[2:5], "stop")


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        ([[]], r"stop_sequences \[0\] is no list of 1 to 64 ints"),
        ([[1], [1] * 65], r"stop_sequences \[1\] is no list"),
        ([[1]] * 65, "stop_sequences has length 65, must be 0 to 64"),
        ([[-1]], "stop_sequences must hold ints"),
    ],
)
def test_a_stop_sequence_that_is_none_is_refused_by_name(
    connect: Connect, endpoint: str, sequences: list[list[int]], text: str
) -> None:
    with serving(endpoint), connect(endpoint) as client:
        slot = client.open(PROMPT)
        with pytest.raises(RequestRejected, match=text):
            list(slot.stream(5, stop_sequences=sequences))
        with pytest.raises(ProtocolError, match="stop_sequences"):
            list(slot.stream(5, stop_sequences=[3]))
        assert len(list(slot.stream(5))) == 5


def test_a_stream_may_begin_with_a_named_token(peer: Peer, engine: FakeEngine) -> None:
    opened = peer.open(PROMPT)
    peer.send("stream", **seat(opened), token=9, max_steps=5, credit=9)
    assert read(peer)[0] == tokens_of_steps(engine, 5, first=9)
    reply = peer.ask("stream", **seat(opened), token=8, max_steps=5, credit=9)
    assert reply["status"] == "position_conflict"
    at = {**seat(opened), "pos": 8}
    assert peer.ask("stream", **at, token=256, max_steps=5, credit=9)["status"] == "invalid"


def test_an_ended_stream_is_read_on_from_any_of_its_positions(peer: Peer) -> None:
    opened = peer.open(PROMPT)
    peer.send("stream", **seat(opened), max_steps=6, credit=9)
    tokens, last = read(peer)
    for got in range(7):
        resumed = peer.send("resume", **{**seat(opened), "pos": 3 + got}, credit=9)
        again, end = read(peer)
        assert (again, end["id"], end["end"]) == (tokens[got:], resumed, "max_steps")
        assert end["pos"] == 4 + got
    for pos in (2, 10):
        reply = peer.ask("resume", **{**seat(opened), "pos": pos}, credit=9)
        assert (reply["status"], reply["context_len"]) == ("position_conflict", 9)
    assert peer.ask("resume", slot=opened["slot"])["status"] == "invalid"
    assert last["context_len"] == 9


def test_a_running_stream_is_read_on_by_the_reader_that_resumes_it(
    peer: Peer, engine: FakeEngine
) -> None:
    opened, expected = peer.open(PROMPT), tokens_of_steps(engine, 20)
    first = peer.send("stream", **seat(opened), max_steps=20, credit=6)
    seen: list[int] = []
    while len(seen) < 6:
        seen += peer.receive()[0]["tokens"]
    stream = peer.send("resume", **{**seat(opened), "pos": 3 + 4}, credit=2)  # knows 4 of the 6
    last, _ = peer.receive()
    assert (last["id"], last["status"], "more" in last) == (first, "cancelled", False)
    frame, _ = peer.receive()
    assert (frame["id"], frame["tokens"], frame["replayed"]) == (stream, expected[4:6], True)
    found: list[int] = []
    while len(found) < 2:
        found += peer.receive()[0]["tokens"]
    peer.send("credit", stream=stream, n=20)
    while True:
        frame, _ = peer.receive()
        found += frame.get("tokens", [])
        if frame.get("end"):
            break
    assert found == expected[6:]


def test_a_client_goes_on_with_its_stream_after_a_broken_connection(
    connect: Connect, endpoint: str, engine: FakeEngine
) -> None:
    expected = tokens_of_steps(engine, 300)
    with (
        serving(endpoint, engine, max_frame_bytes=4096),
        connect(endpoint) as client,
    ):
        slot = client.open(PROMPT)
        stream = slot.stream(300, credit=100)
        found = [next(stream).token for _ in range(10)]
        client._session.link.exchange.max_frame_bytes = 1 << 20
        with pytest.raises(ConnectionLost, match="broke"):
            client.open(np.zeros(2000, np.int32), timeout_s=20)
        found += [step.token for step in slot.resume_stream(timeout_s=20)]
        assert found == expected
        assert slot.context_len == len(PROMPT) + 300
        slot.truncate(5)
        with pytest.raises(RequestRejected, match="no stream of slot"):
            list(slot.resume_stream())


def test_a_frame_holds_all_that_has_completed(endpoint: str, engine: FakeEngine) -> None:
    engine.fake.is_fast = True  # two launches are done whenever the engine looks
    with serving(endpoint, engine), Peer(endpoint) as peer:
        opened = peer.hello().open(PROMPT)
        peer.send("stream", **seat(opened), max_steps=8, credit=9)
        frames: list[dict[str, Any]] = []
        while not (frames and frames[-1].get("end")):
            frames.append(peer.receive()[0])
    assert [len(frame["tokens"]) for frame in frames] == [2, 2, 2, 2]
    assert [token for frame in frames for token in frame["tokens"]] == tokens_of_steps(engine, 8)


def test_streams_and_steps_of_several_clients_share_launches(
    endpoint: str, engine: FakeEngine
) -> None:
    gate = Gate(engine)
    with (
        serving(endpoint, engine) as running, Peer(endpoint) as first, Peer(endpoint) as second,
    ):  # fmt: skip
        one, two = first.hello().open(PROMPT), second.hello().open(PROMPT)
        gate.shut()
        before = engine.fake.launches
        first.send("stream", **seat(one), max_steps=60, credit=60)
        with arriving(running, second):
            second.send("stream", **seat(two), max_steps=60, credit=60)
        gate.open()
        assert read(first)[0] == read(second)[0] == tokens_of_steps(engine, 60)
        assert engine.fake.launches - before <= 64


def test_a_long_stream_is_repeated_a_few_frames_a_turn(endpoint: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(runs, "MAX_FRAME_TOKENS", 10)
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        asked = {**seat(opened), "max_steps": 95, "credit": 95}
        tokens: list[list[int]] = []
        for _ in range(2):
            peer.send("stream", **asked)
            tokens.append([])
            frames = 0
            while True:
                header, _ = peer.receive()
                frames += 1
                tokens[-1] += header["tokens"]
                if not header.get("more"):
                    break
    assert frames == 10 > runs.MAX_FRAMES_EACH
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 95


def test_the_streams_of_a_session_share_its_credit(endpoint: str) -> None:
    engine = FakeEngine()
    gate, options = Gate(engine), {"credits": 8, "session_credits": 10}
    with serving(endpoint, engine, **options) as running, Peer(endpoint) as peer:
        slots = [peer.hello().open(key="a"), peer.open(key="b")]
        gate.shut()
        first = peer.send("stream", **seat(slots[0]), max_steps=99, credit=8)
        fields = {**seat(slots[1]), "max_steps": 2, "credit": 8}
        with arriving(running, peer):
            second = peer.send("stream", **fields)
        gate.open()
        replies = [peer.receive()[0] for _ in range(9)]  # eight of them are a token each
        (refused,) = (reply for reply in replies if reply["id"] == second)
        assert (refused["status"], 2 <= refused["credits_left"] < 8) == ("busy", True)
        peer.send("stream", **fields)
        assert read(peer)[1]["end"] == "max_steps"
        assert peer.ask("credit", stream=first, n=99)["credit"] == 8
