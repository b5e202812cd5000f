from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine, fake_logits
from gates import Gate
from latentd_client import protocol
from serving import Peer, seat


@pytest.fixture
def gate(engine: FakeEngine) -> Iterator[Gate]:
    gate = Gate(engine)
    yield gate
    gate.open()


def results(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name not in ("id", "replayed")}


def test_the_same_step_again_is_replayed_and_appends_nothing(peer: Peer) -> None:
    opened = peer.open()
    first = peer.ask("step", **seat(opened), token=9)
    again = peer.ask("step", **seat(opened), token=9)
    assert (results(again), again["replayed"]) == (results(first), True)
    assert "replayed" not in first
    assert peer.ask("step", **{**seat(opened), "pos": 4})["context_len"] == 5


def test_a_replay_carries_the_logits_again(peer: Peer) -> None:
    opened = peer.open()
    for replayed in (None, True):
        peer.send("step", **seat(opened), token=9, logits=True)
        header, raw = peer.receive()
        assert header.get("replayed") is replayed
        logits = protocol.pick_raw(header["logits"], raw)
        np.testing.assert_array_equal(logits, fake_logits([1, 2, 3, 9], 256))


@pytest.mark.parametrize(
    "change",
    [{"token": 10}, {"token": None}, {"logits": True}, {"sampling": {"temperature": 0.5}}],
    ids=str,
)
def test_another_step_at_an_old_position_is_a_conflict(peer: Peer, change: dict[str, Any]) -> None:
    opened = peer.open()
    peer.ask("step", **seat(opened), token=9)
    reply = peer.ask("step", **{**seat(opened), "token": 9, **change})
    assert (reply["status"], reply["context_len"]) == ("position_conflict", 4)


def test_a_position_ahead_is_a_conflict_with_the_true_length(peer: Peer) -> None:
    opened = peer.open()
    reply = peer.ask("step", **{**seat(opened), "pos": 40})
    assert (reply["status"], reply["context_len"]) == ("position_conflict", 3)


def test_the_same_step_in_flight_is_answered_twice_and_runs_once(peer: Peer, gate: Gate) -> None:
    opened = peer.open()
    gate.shut()
    first = peer.send("step", **seat(opened))
    peer.send("stats")  # refused: the server has seen the step before
    second = peer.send("step", **seat(opened))
    gate.open()
    replies = {header["id"]: header for header, _ in (peer.receive() for _ in range(3))}
    assert (replies[first]["context_len"], replies[second]["context_len"]) == (4, 4)
    assert peer.ask("step", **{**seat(opened), "pos": 4})["context_len"] == 5


def test_a_deadline_and_an_unknown_field_do_not_make_it_another_request(peer: Peer) -> None:
    opened = peer.open()
    peer.ask("step", **seat(opened), deadline_s=5.0)
    assert peer.ask("step", **seat(opened), deadline_s=0.0, colour="red")["replayed"]


def test_rows_are_replayed_one_by_one(peer: Peer) -> None:
    first, second = peer.open(key="a"), peer.open(key="b")
    peer.ask("step", **seat(first))
    reply = peer.ask("step", rows=[seat(first), seat(second)])
    assert [row.get("replayed") for row in reply["rows"]] == [True, None]
    again = peer.ask("step", rows=[seat(first), seat(second)])
    assert [row["replayed"] for row in again["rows"]] == [True, True]
    assert [row["token"] for row in again["rows"]] == [row["token"] for row in reply["rows"]]


def test_an_open_with_the_same_key_finds_its_slot(peer: Peer, engine: FakeEngine) -> None:
    first = peer.open([1, 2], key="a", logits=True)
    raw = np.array([1, 2], np.int32)
    again = peer.ask("open", [raw], key="a", prompt={"raw": 0}, logits=True)
    assert (results(again), again["replayed"]) == (results(first), True)
    assert engine.slots.num_used == 1
    assert peer.open([1, 3], key="a")["status"] == "invalid"
    assert peer.open([1, 2], key="b", logits=True)["slot"] != first["slot"]


def test_an_open_in_flight_is_joined_by_its_repetition(
    peer: Peer, engine: FakeEngine, gate: Gate
) -> None:
    gate.shut()
    for _ in range(2):
        peer.send("open", key="a", prompt=[1, 2])
    gate.open()
    (first, _), (second, _) = peer.receive(), peer.receive()
    assert results(first) == results(second)
    assert engine.slots.num_used == 1


def test_a_truncate_is_replayed_and_ends_the_replays_beyond_it(peer: Peer) -> None:
    opened = peer.open()
    for pos in (3, 4, 5):
        peer.ask("step", **{**seat(opened), "pos": pos}, token=pos)
    at = {**seat(opened), "pos": 6}
    assert peer.ask("truncate", **at, to=4)["context_len"] == 4
    again = peer.ask("truncate", **at, to=4)
    assert (again["context_len"], again["replayed"]) == (4, True)
    assert peer.ask("truncate", **at, to=3)["status"] == "position_conflict"
    assert peer.ask("step", **{**seat(opened), "pos": 5}, token=5)["status"] == "position_conflict"
    assert peer.ask("step", **{**seat(opened), "pos": 3}, token=3)["replayed"]


def test_a_truncate_to_be_done_once_more_waits_for_its_turn_like_any_new_one(
    peer: Peer, gate: Gate
) -> None:
    opened = peer.open()
    back = {**seat(opened), "pos": 4, "to": 3}
    peer.ask("step", **seat(opened), token=5)
    assert peer.ask("truncate", **back)["status"] == "ok"
    peer.ask("step", **seat(opened), token=6)
    gate.shut()
    step = peer.send("step", **{**seat(opened), "pos": 4}, token=7)
    truncate = peer.send("truncate", **back)
    gate.open()
    replies = {header["id"]: header for header, _ in (peer.receive() for _ in range(2))}
    assert replies[step]["context_len"] == 5
    assert replies[truncate]["status"] in ("busy", "position_conflict")


def test_a_close_is_replayed_and_its_slot_keeps_its_replies(peer: Peer) -> None:
    opened = peer.open()
    step = peer.ask("step", **seat(opened))
    at = {"slot": opened["slot"], "epoch": opened["epoch"]}
    assert "replayed" not in peer.ask("close", **at)
    assert peer.ask("close", **at)["replayed"]
    assert results(peer.ask("step", **seat(opened))) == results(step)
    assert peer.ask("step", **{**seat(opened), "pos": 4})["status"] == "epoch_gone"


def test_a_closed_slot_is_gone_although_its_stream_has_not_said_its_end(peer: Peer) -> None:
    for number in range(20):
        opened = peer.open(key=f"closed {number}")
        at = {"slot": opened["slot"], "epoch": opened["epoch"]}
        stream = peer.send("stream", **seat(opened), max_steps=9, credit=1)
        peer.receive()
        close = peer.send("close", **at)
        step = peer.send("step", **at, pos=4)  # most often there before the stream's end is told
        last = {header["id"]: header for header in (peer.receive()[0] for _ in range(3))}
        assert last[close]["status"] == "ok"
        assert last[stream]["end"] == "closed"
        assert last[step]["status"] == "epoch_gone"


def read_stream(peer: Peer) -> tuple[list[int], dict[str, Any], bool]:
    tokens: list[int] = []
    while True:
        header, _ = peer.receive()
        assert header["status"] == "ok", header
        tokens += header["tokens"]
        if not header.get("more"):
            return tokens, header, bool(header.get("replayed"))


def test_an_ended_stream_is_replayed_whole(peer: Peer) -> None:
    opened = peer.open()
    fields = {**seat(opened), "max_steps": 9, "credit": 64}
    peer.send("stream", **fields)
    tokens, last, replayed = read_stream(peer)
    assert (len(tokens), last["end"], last["context_len"], replayed) == (9, "max_steps", 12, False)
    peer.send("stream", **{**fields, "credit": 1})
    assert read_stream(peer) == (tokens, {**last, "id": peer._id, "pos": 4, "tokens": tokens,
                                          "logprobs": [-t / 256 for t in tokens],
                                          "replayed": True}, True)  # fmt: skip
    reply = peer.ask("stream", **{**fields, "max_steps": 8})
    assert (reply["status"], reply["context_len"]) == ("position_conflict", 12)


def test_a_running_stream_goes_on_with_the_reader_that_repeats_it(peer: Peer) -> None:
    opened = peer.open()
    fields = {**seat(opened), "max_steps": 30, "credit": 10}
    first = peer.send("stream", **fields)
    seen: list[int] = []
    while len(seen) < 10:
        seen += peer.receive()[0]["tokens"]
    second = peer.send("stream", **{**fields, "credit": 30})
    last, _ = peer.receive()
    assert (last["id"], last["status"], "more" in last) == (first, "cancelled", False)
    tokens: list[int] = []
    ids = set()
    while len(tokens) < 30:
        header, _ = peer.receive()
        ids.add(header["id"])
        tokens += header["tokens"]
    assert (tokens[:10], ids, first != second) == (seen, {second}, True)
    assert header["end"] == "max_steps"


def test_a_repeated_close_of_the_session_is_replayed_and_nothing_else_is(peer: Peer) -> None:
    opened = peer.open()
    assert "replayed" not in peer.ask("close")
    assert peer.ask("close")["replayed"]
    assert peer.ask("step", **seat(opened))["status"] == "lease_lost"
    assert peer.ask("close", session="nobody")["status"] == "lease_lost"


@pytest.mark.parametrize("op", ["open", "stream"])
def test_the_id_of_what_is_in_flight_is_refused_for_another_request(peer: Peer, op: str) -> None:
    first, second = peer.open(key="a"), peer.open(key="b")
    stream = peer.send("stream", **seat(first), max_steps=99, credit=1)
    peer.receive()
    peer._id = stream - 1
    fields: dict[str, Any] = {**seat(second), "max_steps": 9, "credit": 1}
    reply = peer.ask(op, **({"key": "c", "prompt": [1]} if op == "open" else fields))
    assert (reply["status"], f"id {stream}" in reply["error"]) == ("invalid", True)
    assert peer.ask("cancel", request=stream)["known"], "it is still the first one's"
