"""The fixed layout of steps and their replies: the same maps as of the general way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentd_client import Client, field_checks, fields, packed, protocol
from latentd_client._exchange import Exchange
from latentd_client._request import Call
from serving import Peer, Running, seat, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SESSION = "0123456789abcdef" * 3
IDS = st.integers(1, packed.MAX_ID)
INTS = st.integers(0, (1 << 31) - 1)
ROW = st.tuples(INTS, st.integers(0, (1 << 63) - 1), INTS, INTS)
RESULT = st.tuples(INTS, INTS, st.floats(width=32, allow_nan=False))
ONE = packed.pack_step(SESSION.encode(), 60.0, packed.pack_seat(3, 1 << 40), 100, 7)
TWO = packed.pack_steps(
    SESSION.encode(), 60.0, [(packed.pack_seat(slot, 9), 100, 7) for slot in (3, 4)]
)


def fields_of(row: packed.Row) -> dict[str, int]:
    return dict(zip(("slot", "epoch", "pos", "token"), row, strict=True))


def request(rows: Sequence[packed.Row], request_id: int, is_batch: bool) -> bytes:
    places = [(packed.pack_seat(slot, epoch), pos, token) for slot, epoch, pos, token in rows]
    if is_batch:
        return packed.number(packed.pack_steps(SESSION.encode(), 5.0, places), request_id)
    return packed.number(packed.pack_step(SESSION.encode(), 5.0, *places[0]), request_id)


@given(ROW, IDS)
def test_a_packed_step_is_the_map_of_the_protocol(row: packed.Row, request_id: int) -> None:
    frame = request([row], request_id, False)
    header = {"v": 1, "id": request_id, "op": "step", "session": SESSION, "deadline_s": 5.0}
    assert protocol.decode_header(frame) == {**header, **fields_of(row)}
    assert packed.read_steps(frame) == (request_id, SESSION, 5.0, False, [row])


@given(st.lists(ROW, min_size=1, max_size=128), IDS)
def test_packed_steps_are_the_map_of_the_protocol(rows: list[packed.Row], request_id: int) -> None:
    frame = request(rows, request_id, True)
    header = {"v": 1, "id": request_id, "op": "step", "session": SESSION, "deadline_s": 5.0}
    assert protocol.decode_header(frame) == {**header, "rows": [fields_of(row) for row in rows]}
    assert packed.read_steps(frame) == (request_id, SESSION, 5.0, True, rows)


@given(st.lists(RESULT, min_size=1, max_size=128), IDS)
def test_a_packed_reply_is_the_map_of_the_protocol(
    results: list[packed.Result], request_id: int
) -> None:
    rows = [
        {"status": "ok", "context_len": context_len, "token": token, "logprob": logprob}
        for context_len, token, logprob in results
    ]
    frame = packed.pack_results(request_id, results)
    head = {"v": 1, "id": request_id, "status": "ok"}
    assert msgpack.unpackb(frame) == {**head, "rows": rows}
    assert packed.read_results(frame) == (request_id, results)
    frame = packed.pack_result(request_id, results[0])
    assert msgpack.unpackb(frame) == {**head, **rows[0]}
    assert packed.read_results(frame) == (request_id, results[:1])


def test_a_log_probability_may_be_any_float() -> None:
    for logprob in (-math.inf, math.nan, -0.0):
        found = packed.read_results(packed.pack_result(1, (2, 3, logprob)))
        assert found is not None
        assert repr(found[1][0][2]) == repr(logprob)


@pytest.mark.parametrize("whole", [ONE, TWO], ids=["one", "rows"])
def test_a_frame_with_one_other_byte_means_what_its_map_says(whole: packed.Packed) -> None:
    """Every byte, every bit: whoever is taken for packed passes the general checks and is equal."""
    frame = packed.number(whole, 5)
    for at in range(len(frame)):
        for bit in range(8):
            other = bytearray(frame)
            other[at] ^= 1 << bit
            steps = packed.read_steps(bytes(other))
            if steps is None:
                continue
            header = protocol.decode_header(bytes(other))
            table = fields.STEP_ROWS if steps.is_batch else fields.OPS["step"]
            field_checks.check(table, header, "step")
            assert (header["v"], header["id"], header["op"]) == (1, steps.request_id, "step")
            assert (header["session"], header["deadline_s"]) == (steps.session, steps.deadline_s)
            rows = header["rows"] if steps.is_batch else [header]
            assert [tuple(row[name] for name in fields_of((0, 0, 0, 0))) for row in rows] == [
                *steps.rows
            ]


@pytest.mark.parametrize("whole", [ONE, TWO], ids=["one", "rows"])
def test_a_frame_of_another_length_is_not_packed(whole: packed.Packed) -> None:
    frame = packed.number(whole, 5)
    assert packed.read_steps(frame) is not None
    assert not any(packed.read_steps(frame[:size]) for size in range(len(frame)))
    assert packed.read_steps(frame + b"\0") is None


@pytest.mark.parametrize(
    ("deadline_s", "row"),
    [
        (-1.0, (1, 2, 3, 4)), (2e9, (1, 2, 3, 4)), (math.nan, (1, 2, 3, 4)),
        (1.0, (1 << 31, 2, 3, 4)), (1.0, (1, 1 << 63, 3, 4)), (1.0, (1, 2, 3, 1 << 31)),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_left_to_the_general_checks(
    deadline_s: float, row: packed.Row
) -> None:
    slot, epoch, pos, token = row
    place = (packed.pack_seat(slot, epoch), pos, token)
    one = packed.pack_step(SESSION.encode(), deadline_s, *place)
    assert packed.read_steps(packed.number(one, 5)) is None
    good = (packed.pack_seat(1, 2), 3, 4)
    two = packed.pack_steps(SESSION.encode(), deadline_s, [good, place])
    assert packed.read_steps(packed.number(two, 5)) is None


@pytest.mark.parametrize("count", [0, 129])
def test_a_wrong_number_of_rows_is_left_to_the_general_checks(count: int) -> None:
    places = [(packed.pack_seat(1, 2), 3, 4)] * count
    steps = packed.pack_steps(SESSION.encode(), 1.0, places)
    assert packed.read_steps(packed.number(steps, 5)) is None


@given(st.binary(max_size=200))
def test_other_replies_are_not_packed(frame: bytes) -> None:
    assert packed.read_results(frame) is None


@pytest.fixture
def running(endpoint: str) -> Iterator[Running]:
    with serving(endpoint) as running:
        yield running


def test_both_layouts_are_one_operation_to_the_daemon(running: Running) -> None:
    """The same step in the other layout is the same request: its stored reply comes again."""
    with Peer(running.endpoint) as peer:
        opened = peer.hello().open()
        first = peer.ask("step", **seat(opened), token=9)
        place = (packed.pack_seat(opened["slot"], opened["epoch"]), opened["context_len"], 9)
        for step in (
            packed.pack_step(peer.session.encode(), 60.0, *place),
            packed.pack_steps(peer.session.encode(), 60.0, [place]),
        ):
            peer.socket.send(packed.number(step, 77))
            again, _ = peer.receive()
            assert again["id"] == 77
            row = again["rows"][0] if "rows" in again else again
            assert (row["replayed"], row["token"]) == (True, first["token"])


def test_a_packed_step_is_refused_by_code_like_any_other(running: Running) -> None:
    with Peer(running.endpoint) as peer:
        opened = peer.hello().open()
        place = (packed.pack_seat(opened["slot"], opened["epoch"]), 1, 9)
        for session, code in (
            (peer.session, "position_conflict"), ("0" * 48, "epoch_gone"),
            (peer.session[:-1] + "x", "lease_lost"),
        ):  # fmt: skip
            step = packed.pack_step(session.encode(), 60.0, *place)
            peer.socket.send(packed.number(step, 77))
            reply, _ = peer.receive()
            assert (reply["id"], reply["status"]) == (77, code)
        late = packed.pack_steps(peer.session.encode(), 0.0, [(place[0], 3, 9)])
        peer.socket.send(packed.number(late, 78))
        assert peer.receive()[0]["rows"][0]["status"] == "deadline"


def sent_by(client: Client, frames: list[bytes]) -> None:
    """Note the first frame of all that a client sends."""
    exchange = client._session.link.exchange
    start = exchange.start

    def noting(call: Call) -> Any:
        pending, parts = start(call)
        frames.append(bytes(parts[0]))
        return pending, parts

    exchange.start = noting  # type: ignore[method-assign]


def test_the_steps_of_our_clients_are_packed_both_ways(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    decode = protocol.decode_header

    def noting(frame: bytes) -> Any:
        decoded.append(frame)
        return decode(frame)

    with Client(running.endpoint) as client:
        slots = [client.open([1, 2, 3]) for _ in range(3)]
        frames: list[bytes] = []
        sent_by(client, frames)
        monkeypatch.setattr(protocol, "decode_header", noting)
        slots[0].step()
        slots[0].step(7)
        client.step([(slots[0], None), (slots[1], 5)])
        monkeypatch.undo()
        assert [bool(packed.read_steps(frame)) for frame in frames] == [True] * 3
        assert not decoded  # neither the daemon, on its thread, nor the client went the other way
        slots[2].step(logits=True)
        assert not packed.read_steps(frames[-1])


def test_numbers_of_requests_go_round_and_leave_out_those_in_flight() -> None:
    exchange = Exchange()
    first, _ = exchange.start(Call("stream", {}))
    assert first.request_id == 1
    exchange._last_id = packed.MAX_ID - 1
    assert exchange.start(Call("ping", {}))[0].request_id == packed.MAX_ID
    assert exchange.start(Call("ping", {}))[0].request_id == 2
