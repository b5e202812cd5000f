"""What a session cannot do to another one, whatever it knows of it, and what nobody is told."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine
from gates import Gate
from latentd import snapshot
from latentd.sessions import Sessions
from latentd_client import Client, Control, RequestRejected, Sampling, fields
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from serving import Running

NAMES_A_SLOT = {
    "step", "stream", "credit", "verify", "truncate", "fork", "close", "export", "attend", "resume",
}  # fmt: skip


@pytest.fixture
def running(endpoint: str) -> Iterator[Running]:
    with serving(endpoint) as running:
        yield running


def requests(opened: dict[str, Any], stream: int) -> dict[str, dict[str, Any]]:
    """What names a slot of the owner's, or what runs there, by what is asked."""
    at = seat(opened)
    where = {"slot": at["slot"], "epoch": at["epoch"]}
    return {
        "step": at,
        "stream": {**at, "max_steps": 3, "credit": 3},
        "credit": {"stream": stream, "n": 9},
        "verify": {**at, "draft": [1, 2]},
        "truncate": {**at, "to": 0},
        "fork": {**at, "key": "mine"},
        "close": where,
        "export": {**at, "first": 0, "count": 1},
        "attend": {
            "layer": 0, "rows": [list(at.values())], "q": {"raw": 0}, "latent": {"raw": 1},
        },
        "resume": {**at, "credit": 9},
    }  # fmt: skip


def test_a_session_does_nothing_with_slots_of_another_one_that_it_can_name(
    running: Running,
) -> None:
    """Each operation that names a slot is here: the table of the wire says which do."""
    named = {
        op
        for op, table in fields.OPS.items()
        if {"slot", "rows", "stream"} & {field.name for field in table}
    }
    assert named == NAMES_A_SLOT
    info = running.engine.info
    q = np.zeros((1, info.heads, info.nope_dim + 64), np.uint16)
    latent = np.zeros((1, 576), np.uint16)
    with Peer(running.endpoint) as owner, Peer(running.endpoint) as other:
        opened, busy = owner.hello().open(), owner.open(key="streams")
        other.hello()
        stream = owner.send("stream", **seat(busy), max_steps=4000, credit=1)
        first = owner.receive()[0]
        before = running.engine.slot(opened["slot"], opened["epoch"])
        for at in (opened, busy):
            for op, given in requests(at, stream).items():
                raw = (q, latent) if op == "attend" else ()
                reply = other.ask(op, raw, **given)
                if op == "credit":
                    assert reply["status"] != "ok" or reply.get("known") is False
                else:
                    assert reply["status"] == "epoch_gone", op
        assert other.ask("cancel", request=stream)["known"] is False
        assert running.engine.slot(opened["slot"], opened["epoch"]) == before
        assert running.engine.slots.num_used == 2
        assert other.ask("resume")["slots"] == []
        owner.send("credit", stream=stream, n=1)
        replies = [owner.receive()[0] for _ in range(2)]
        assert first["pos"] + 1 in [reply.get("pos") for reply in replies]


def test_the_key_of_anothers_open_or_adoption_finds_nothing(running: Running) -> None:
    with Peer(running.endpoint) as owner, Peer(running.endpoint) as other:
        opened = owner.hello().open(key="secret")
        theirs = other.hello().open(key="secret")
        assert (theirs["slot"], theirs["epoch"]) != (opened["slot"], opened["epoch"])
        for stage in ("drop", "commit"):
            given: dict[str, Any] = {stage: True}
            reply = other.ask("adopt", key="another", **given)
            assert reply["status"] == "epoch_gone" or reply["known"] is False
        assert owner.ask("step", **seat(opened))["context_len"] == 4


def test_what_others_run_is_not_cancelled_on_the_control_socket(running: Running) -> None:
    assert isinstance(running.engine, FakeEngine)
    gate = Gate(running.engine)
    with Peer(running.endpoint) as owner, Peer(running.endpoint) as other:
        opened = owner.hello().open()
        other.hello()
        gate.shut()
        step = owner.send("step", **seat(opened))
        with Control(running.server.control_endpoint) as control:
            assert control.cancel(other.session, step) is False
        gate.open()
        assert owner.receive()[0]["context_len"] == 4


class Watched(str):
    """A token that notes whether it is compared with another one of the same length."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Watched.compared += 1
        return str(self) == str(other)

    __hash__ = str.__hash__


def test_tokens_are_looked_up_by_hash_so_that_time_tells_nothing_of_a_guess() -> None:
    sessions = Sessions(60, 60)
    token = sessions.create(0.0).token
    assert len(token) == 48
    assert len(bytes.fromhex(token[16:])) * 8 == 128
    Watched.compared = 0
    for at in range(16, 48):
        guess = Watched(token[:at] + ("0" if token[at] != "0" else "1") + token[at + 1 :])
        with pytest.raises(RequestRejected):
            sessions.renew(guess, 0.0)
    assert Watched.compared == 0
    sessions.renew(Watched(token), 0.0)
    assert Watched.compared > 0  # it would have noticed


def test_a_thousand_tokens_differ_in_their_random_half() -> None:
    sessions = Sessions(60, 60)
    tokens = [sessions.create(0.0).token for _ in range(1000)]
    assert len({token[16:] for token in tokens}) == 1000
    bits = np.unpackbits(np.frombuffer(bytes.fromhex("".join(t[16:] for t in tokens)), np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01


def test_a_token_is_in_no_log_no_figure_no_trace_and_no_snapshot(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine()
    with serving(endpoint, engine) as running:
        client, control = Client(endpoint), Control(running.server.control_endpoint)
        token = client._session.calls.session
        slot = client.open([1, 2], sampling=Sampling(seed=3))
        list(slot.stream(3))
        engine.admit_stream = None  # type: ignore[method-assign, assignment]
        with pytest.raises(RequestRejected, match="its log says how"):
            list(slot.stream(3))
        told = [control.health(), control.stats(), control.sessions(), control.trace()]
        (session,) = running.server.sessions
        snapshot.save(engine, running.server.sessions, tmp_path / "saved")
        client.close()
        control.close()
    files = [path.read_bytes() for path in (tmp_path / "saved").iterdir()]
    assert len(files) == 3
    everything = (caplog.text, repr(told), repr(session), *map(repr, files))
    assert "a request failed inside the daemon" in caplog.text
    assert not [text for text in everything if token in text or token[16:] in text]


def test_a_session_has_so_many_slots_and_no_more_and_others_have_theirs(endpoint: str) -> None:
    engine = FakeEngine(max_slots=8)
    limits = {"session_slots": 2, "max_waiting": 4}
    with (
        serving(endpoint, engine, **limits), Client(endpoint) as greedy, Client(endpoint) as other
    ):  # fmt: skip
        slots = [greedy.open([1]), greedy.open([2])]
        pages = slots[0].export()
        calls: list[Callable[[], object]] = [
            lambda: greedy.open([3]),
            slots[0].fork,
            lambda: greedy.adopt(pages),
        ]
        for more in calls:
            with pytest.raises(RequestRejected, match=r"2 slots.*session_slots") as refused:
                more()
            assert refused.value.code == "no_slot"
        assert [other.open([n]).step().context_len for n in (1, 2)] == [2, 2]
        slots[0].close()
        assert greedy.open([4]).step().context_len == 2


def test_what_waits_for_a_slot_counts_as_one_of_the_sessions(endpoint: str) -> None:
    engine = FakeEngine(max_slots=2)
    limits = {"session_slots": 2, "max_waiting": 64}
    with serving(endpoint, engine, **limits), Peer(endpoint) as greedy, Peer(endpoint) as other:
        greedy.hello().open(key="one")
        opened = other.hello().open()
        greedy.send("open", key="two", prompt=[1])
        assert greedy.ask("open", key="three", prompt=[1])["status"] == "no_slot"
        other.send("open", key="mine", prompt=[1])
        other.send("close", slot=opened["slot"], epoch=opened["epoch"])
        assert greedy.receive()[0]["status"] == "ok"


def test_no_request_makes_the_daemon_open_a_file(running: Running, tmp_path: Path) -> None:
    """Every text field of every operation holds a path. (A drain's is only an admin's: see
    test_access.)"""
    path = str(tmp_path / "there")
    touched: list[tuple[str, object]] = []
    is_on = [True]

    def note(event: str, args: tuple[object, ...]) -> None:
        if is_on[0] and event.partition(".")[0] in ("open", "os", "shutil", "glob", "subprocess"):
            touched.append((event, args))

    with Peer(running.endpoint) as peer, Peer(running.server.control_endpoint) as control:
        opened = peer.hello().open()
        sys.addaudithook(note)
        try:
            for socket, table in ((peer, fields.OPS), (control, fields.CONTROL_OPS)):
                for op, op_fields in table.items():
                    if op == "drain":
                        continue
                    given = _filled(op_fields, path, opened)
                    for session in (peer.session, path[:64]):
                        socket.ask(op, **{**given, "session": session})
        finally:
            is_on[0] = False
    assert not touched


def _filled(table: tuple[fields.Field, ...], path: str, opened: dict[str, Any]) -> dict[str, Any]:
    """What a request must have, and all text that it may have."""
    known: dict[str, object] = {**seat(opened), "versions": [1, 1], "begin": {}}
    some = {
        "str": path, "bool": True, "float": 1.0, "int": 1, "ints": [1], "prompt": [1],
        "tensor": {"raw": 0}, "seats": [list(seat(opened).values())],
    }  # fmt: skip
    filled: dict[str, Any] = {}
    for field in table:
        if field.inner:
            filled[field.name] = _filled(field.inner, path, opened)
        elif field.required or field.kind == "str":
            value = known.get(field.name, some.get(field.kind))
            filled[field.name] = value[: int(field.high)] if isinstance(value, str) else value
    return filled
