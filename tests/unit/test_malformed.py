import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from latentd_client import Client, protocol
from serving import Peer, Running, seat, serving

GOOD = {"v": 1, "id": 7, "op": "ping"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(f"ipc://{tmp_path_factory.mktemp('m')}/d.sock", FakeEngine(max_slots=8)) as server:
        yield server


@pytest.fixture
def peer(running: Running) -> Iterator[Peer]:
    """A peer with a session; afterwards another client must still decode."""
    with Peer(running.endpoint) as peer, Client(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        yield peer.hello()
        tokens = [1, 2, 3, slot.token]
        assert slot.step().token == running.engine.expected_token(tokens)  # type: ignore[attr-defined]
        peer.ask("close")


def answer(peer: Peer, *frames: bytes) -> dict[str, Any]:
    peer.socket.send_multipart(frames)
    return peer.receive()[0]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", msgpack.packb(GOOD)],
        [b"\xc1\xff"],
        [msgpack.packb([1, 2])],
        [msgpack.packb({**GOOD, "x": msgpack.ExtType(1, b"x")})],
        [msgpack.packb({**GOOD, "x": msgpack.Timestamp(1)})],
        [b"\x81\xa1a" + b"\x91" * 50_000],
        [msgpack.packb(GOOD)[:-3]],
        [msgpack.packb({"v": 1, "op": "ping"})],
        [msgpack.packb({**GOOD, "id": "7"})],
        [msgpack.packb({**GOOD, "id": -7})],
        [msgpack.packb({**GOOD, "id": True})],
    ],
    ids=[
        "empty", "delimiter", "no msgpack", "list", "ext", "timestamp", "bomb", "truncated",
        "no id", "text id", "negative id", "bool id",
    ],
)  # fmt: skip
def test_a_request_without_a_readable_id_gets_a_reply_without_one(
    peer: Peer, frames: list[bytes]
) -> None:
    reply = answer(peer, *frames)
    assert (reply["id"], reply["status"]) == (None, "invalid")
    assert reply["error"]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([msgpack.packb({"v": 1, "id": 7})], "invalid"),
        ([msgpack.packb({**GOOD, "op": 5})], "invalid"),
        ([msgpack.packb({**GOOD, "op": "fly"})], "unsupported"),
        ([msgpack.packb({**GOOD, "op": "reload"})], "unsupported"),
        ([msgpack.packb({**GOOD, "op": "stats"})], "unsupported"),
        ([msgpack.packb({**GOOD, "v": 2})], "version"),
        ([msgpack.packb({"id": 7, "op": "ping"})], "version"),
        ([msgpack.packb({**GOOD, "op": "hello", "versions": [2, 3]})], "version"),
        ([msgpack.packb({**GOOD, "op": "hello", "versions": [1, "x"]})], "invalid"),
        ([msgpack.packb(GOOD), b"surplus"], "invalid"),
        ([msgpack.packb(GOOD)] + [b"x"] * 16, "too_large"),
        ([msgpack.packb(GOOD)] + [b"x"] * 5000, "too_large"),
        ([msgpack.packb({**GOOD, "session": "nobody"})], "lease_lost"),
        ([msgpack.packb({**GOOD, "session": "0" * 48})], "epoch_gone"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_by_code(peer: Peer, frames: list[bytes], code: str) -> None:
    reply = answer(peer, *frames)
    assert (reply["id"], reply["status"]) == (7, code)


def test_a_header_over_the_limit_is_too_large(peer: Peer) -> None:
    reply = answer(peer, msgpack.packb({**GOOD, "x": "y" * protocol.MAX_HEADER_BYTES}))
    assert reply["status"] == "too_large"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slot", -1), ("slot", "0"), ("slot", 1 << 63), ("slot", None), ("epoch", 1.0),
        ("pos", True), ("pos", [3]), ("pos", (1 << 64) - 1), ("token", -2), ("token", 1 << 40),
        ("logits", 1), ("sampling", [1]), ("deadline_s", "soon"), ("deadline_s", float("nan")),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_with_a_bad_field_names_it(peer: Peer, field: str, value: object) -> None:
    opened = peer.open()
    reply = peer.ask("step", **{**seat(opened), field: value})
    assert reply["status"] == "invalid"
    assert field in reply["error"]
    assert peer.ask("step", **seat(opened))["context_len"] == 4


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0}, {"temperature": float("inf")}, {"top_p": 0}, {"top_p": float("nan")},
        {"top_k": 1.5}, {"min_p": 2}, {"seed": -1}, {"seed": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_out_of_range_is_refused_by_name(peer: Peer, sampling: dict[str, Any]) -> None:
    reply = peer.open(key="s", sampling=sampling)
    assert reply["status"] == "invalid"
    assert next(iter(sampling)) in reply["error"]


@pytest.mark.parametrize(
    "prompt",
    [5, "abc", [1, -1], [1, 1 << 40], [1, None], [[1]], {"raw": 1}, {"raw": "0"}, {}, [256]],
    ids=str,
)
def test_a_bad_prompt_is_refused(peer: Peer, prompt: object) -> None:
    reply = peer.ask("open", key="p", prompt=prompt)
    assert reply["status"] == "invalid"


@pytest.mark.parametrize(
    "raw",
    [np.zeros(3, np.float32), np.zeros((2, 2), np.int32), np.full(3, -1, np.int32)],
    ids=["dtype", "dimensions", "negative"],
)
def test_a_bad_raw_prompt_is_refused(peer: Peer, raw: np.ndarray[Any, Any]) -> None:
    assert peer.ask("open", [raw], key="p", prompt={"raw": 0})["status"] == "invalid"


def test_rows_are_checked_one_by_one(peer: Peer) -> None:
    opened = peer.open()
    reply = peer.ask("step", rows=[{**seat(opened)}, {**seat(opened), "pos": "x"}])
    assert reply["status"] == "invalid"
    assert "rows[1]" in reply["error"]
    reply = peer.ask("step", rows=[{**seat(opened)}, {**seat(opened), "slot": 77}])
    assert [row["status"] for row in reply["rows"]] == ["ok", "epoch_gone"]
    assert peer.ask("step", rows=[])["status"] == "invalid"


def test_unknown_fields_are_ignored(peer: Peer) -> None:
    assert peer.ask("ping", colour="green")["status"] == "ok"


def test_an_engine_that_fails_on_a_request_is_an_internal_error(
    peer: Peer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(running.engine, "admit_open", fail)
        assert peer.open(key="f")["status"] == "internal"
    assert peer.open(key="f")["status"] == "ok"


def test_raw_garbage_on_the_socket_harms_nobody(peer: Peer, running: Running) -> None:
    path = running.endpoint.removeprefix("ipc://")
    old = bytes.fromhex("0100")  # looks like the greeting of an early protocol
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(300), old + b"\x05\x00hello"):
        with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
            raw.settimeout(0.2)
            raw.connect(path)
            raw.sendall(garbage)
            raw.recv(1000)
    assert peer.ask("ping")["status"] == "ok"


def test_a_frame_over_the_limit_only_costs_its_sender_the_connection(endpoint: str) -> None:
    with serving(endpoint, max_frame_bytes=4096), Client(endpoint) as client:
        slot = client.open([1])
        with Peer(endpoint) as peer:
            peer.hello()
            peer.socket.send(bytes(5000))
            assert slot.step().context_len == 2


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5)
    | st.floats() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
names = st.sampled_from(
    ["slot", "epoch", "pos", "token", "logits", "sampling", "rows", "prompt", "key", "raw", "n",
     "max_steps", "stop", "credit", "stream", "to", "versions", "session", "request", "deadline_s"]
)  # fmt: skip
ops = st.sampled_from(
    ["hello", "open", "step", "stream", "credit", "truncate", "close", "cancel", "resume", "ping"]
)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    op=ops, header=st.dictionaries(names, junk, max_size=6), tail=st.lists(st.binary(), max_size=3)
)
def test_every_strange_request_gets_one_reply(
    running: Running, op: str, header: dict[str, Any], tail: list[bytes]
) -> None:
    with Peer(running.endpoint) as peer:
        head = msgpack.packb({"session": "x", **header, "v": 1, "id": 7, "op": op})
        reply = answer(peer, head, *tail)
        assert reply["id"] == 7
        assert answer(peer, msgpack.packb({**GOOD, "id": 8}))["id"] == 8


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_random_frames_get_a_reply(running: Running, frames: list[bytes]) -> None:
    with Peer(running.endpoint) as peer:
        assert "status" in answer(peer, *frames)


@pytest.mark.parametrize("version", [True, 1.0, "1", "a\nb", None, [1], 2])
def test_another_version_is_refused_in_one_line(peer: Peer, version: object) -> None:
    refusal = answer(peer, msgpack.packb({**GOOD, "v": version}))
    assert (refusal["status"], refusal["versions"]) == ("version", [1, 1])
    assert refusal["error"].splitlines() == [refusal["error"]]


def test_an_empty_frame_of_absurd_dimensions_is_invalid(peer: Peer) -> None:
    raw = [{"dtype": "int32", "shape": [0, 1 << 39, 1 << 39]}]
    assert answer(peer, msgpack.packb({**GOOD, "raw": raw}), b"")["status"] == "invalid"
