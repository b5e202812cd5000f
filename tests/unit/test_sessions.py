import time
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine
from gates import wait_until
from latentd.records import MAX_STORED, OpenRecord, SlotRecord, Stored
from latentd.runs import TOKEN_BYTES
from latentd.session import MAX_CLOSED, MAX_CLOSED_BYTES, Session
from latentd.sessions import MAX_ALL_CLOSED_BYTES, Sessions
from latentd_client import Client, Control, RequestRejected
from serving import Peer, lapse, seat, serving


def test_a_slot_belongs_to_its_session(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as owner, Peer(endpoint) as other:
        opened = owner.hello().open()
        other.hello()
        for op, fields in (
            ("step", seat(opened)),
            ("stream", {**seat(opened), "max_steps": 3, "credit": 3}),
            ("truncate", {**seat(opened), "to": 0}),
            ("close", {"slot": opened["slot"], "epoch": opened["epoch"]}),
        ):
            assert other.ask(op, **fields)["status"] == "epoch_gone"
        assert owner.ask("step", **seat(opened))["context_len"] == 4


def test_the_token_resumes_a_session_on_another_connection(endpoint: str) -> None:
    with serving(endpoint):
        with Peer(endpoint) as peer:
            opened = peer.hello().open()
            step = peer.ask("step", **seat(opened))
        with Peer(endpoint) as again:
            again.session = peer.session
            reply = again.ask("resume")
            assert reply["slots"] == [
                {"slot": opened["slot"], "epoch": opened["epoch"], "context_len": 4,
                 "token": step["token"], "busy": False}
            ]  # fmt: skip
            assert again.ask("step", **seat(opened))["replayed"]


def test_silence_beyond_lease_and_grace_frees_the_slots(endpoint: str) -> None:
    with serving(endpoint, lease_s=0.2, grace_s=0.2) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        wait_until(lambda: running.engine.slots.num_used == 0)
        assert peer.ask("step", **seat(opened))["status"] == "lease_lost"
        assert peer.ask("ping")["status"] == "lease_lost"


def test_a_lost_session_is_reclaimed_within_the_grace_period(endpoint: str) -> None:
    with serving(endpoint, lease_s=0.1, grace_s=30.0), Peer(endpoint) as peer:
        opened = peer.hello().open()
        time.sleep(0.5)
        assert peer.ask("step", **seat(opened))["context_len"] == 4


def test_a_renewal_on_the_control_socket_counts(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        peer.hello()
        (session,) = running.server.sessions
        before = session.expires_at
        with Control(running.server.control_endpoint) as control:
            control.renew(peer.session)
            assert session.expires_at > before
            with pytest.raises(RequestRejected) as refused:
                control.renew("nobody")
        assert refused.value.code == "lease_lost"


def test_a_stream_stops_when_its_session_is_not_renewed(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        peer.send("stream", **seat(opened), max_steps=4000, credit=5)
        while peer.receive()[0]["context_len"] < 8:
            pass
        lapse(running, peer.session)
        header, _ = peer.receive()
        assert (header["end"], header["context_len"]) == ("cancelled", 8)


def test_closing_the_session_ends_what_runs_in_it(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        stream = peer.send("stream", **seat(opened), max_steps=4000, credit=5)
        peer.receive()
        peer.send("close")
        ends: dict[int, dict[str, Any]] = {}
        while len(ends) < 2:
            header, _ = peer.receive()
            if not header.get("more"):
                ends[header["id"]] = header
        assert ends[stream]["end"] == "closed"
        assert running.engine.slots.num_used == 0
        assert peer.ask("ping")["status"] == "lease_lost"


def test_a_session_of_another_life_is_told_of_the_restart() -> None:
    token = Sessions(1, 1).create(0.0).token
    with pytest.raises(RequestRejected, match="restarted") as refused:
        Sessions(1, 1).renew(token, 0.0)
    assert refused.value.code == "epoch_gone"


def test_among_too_many_sessions_the_one_that_owns_nothing_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("latentd.sessions.MAX_SESSIONS", 3)
    sessions = Sessions(10, 5)
    owner, silent, renewed = (sessions.create(float(now)) for now in range(3))
    owner.slots[0, 1] = SlotRecord(0, 1)
    fresh = sessions.create(3.0)
    assert (set(sessions), silent.is_gone) == ({owner, renewed, fresh}, True)
    for session in (renewed, fresh):
        session.slots[1, 1] = SlotRecord(1, 1)
    with pytest.raises(RequestRejected, match="all 3 sessions") as refused:
        sessions.create(4.0)
    assert refused.value.code == "busy"


def test_overdue_tells_the_lost_from_the_ended() -> None:
    sessions = Sessions(10, 5)
    session = sessions.create(0.0)
    assert sessions.overdue(9.9) == ([], [])
    assert sessions.overdue(12.0) == ([session], [])
    assert sessions.overdue(15.1) == ([session], [session])
    sessions.renew(session.token, 15.1)
    assert sessions.overdue(25.0) == ([], [])


def test_closed_slots_are_kept_for_the_grace_period() -> None:
    sessions = Sessions(10, 5)
    session = sessions.create(0.0)
    for slot_id, key in enumerate("ab"):
        session.add_slot(slot_id, 1, key)
        stored = Stored(key, {"slot": slot_id, "epoch": 1, "context_len": 0})
        session.opens[key] = OpenRecord(key, None, stored)
    session.slots[0, 1].closed_at = 3.0
    session.note_closed(session.slots[0, 1])
    sessions.forget_old(7.9)
    assert (set(session.slots), set(session.opens)) == ({(0, 1), (1, 1)}, {"a", "b"})
    sessions.forget_old(8.1)
    assert (set(session.slots), set(session.opens)) == ({(1, 1)}, {"b"})


@pytest.mark.parametrize(("size", "kept"), [(0, MAX_CLOSED), (MAX_CLOSED_BYTES // 20, 20)])
def test_the_slots_closed_first_are_forgotten_when_too_much_is_kept_of_them(
    size: int, kept: int
) -> None:
    session = Sessions(10, 5).create(0.0)
    for number in range(MAX_CLOSED + 9):
        stored = Stored("", {"slot": 0, "epoch": number, "context_len": 0})
        logits = {"logits": np.broadcast_to(np.float32(0), size // 4)}
        session.opens[str(number)] = OpenRecord("", None, stored._replace(tensors=logits))
        session.note_closed(session.add_slot(0, number, str(number)))
    last = range(MAX_CLOSED + 9 - kept, MAX_CLOSED + 9)
    assert list(session.slots) == list(session.closed) == [(0, number) for number in last]
    assert list(session.opens) == [str(number) for number in last]
    assert session.closed_bytes == kept * (size // 4 * 4)


def test_stored_replies_are_bounded_in_number_and_bytes() -> None:
    record = SlotRecord(0, 1)
    for pos in range(20):
        record.store(pos, Stored(pos, {"context_len": pos + 1}))
    assert list(record.replies) == list(range(20 - MAX_STORED, 20))
    record.store(20, Stored(20, {"context_len": 21}, {"logits": np.zeros(1_000_000, np.float32)}))
    assert list(record.replies) == [20]


def test_sessions_of_two_clients_do_not_see_each_other(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint) as first, Client(endpoint) as second:
        slots = [client.open([1, 2], key="same") for client in (first, second)]
        assert slots[0].slot_id != slots[1].slot_id
        assert slots[0].step() == slots[1].step()


def close_one(sessions: Sessions, session: Session, number: int, size: int) -> None:
    key = str(number)
    logits = {"logits": np.broadcast_to(np.float32(0), size // 4)}
    stored = Stored("", {"slot": 0, "epoch": number, "context_len": 0}, logits)
    session.opens[key] = OpenRecord("", None, stored)
    record = session.add_slot(0, number, key)
    record.closed_at = 0.0
    sessions.note_closed(session, record)


def test_of_all_sessions_the_one_that_keeps_most_of_closed_slots_gives_way() -> None:
    sessions = Sessions(10, 5)
    small, *others = (sessions.create(0.0) for _ in range(12))
    close_one(sessions, small, 0, 1 << 20)
    for number in range(4):
        for session in others:
            close_one(sessions, session, number, MAX_CLOSED_BYTES // 4)
    assert sum(session.closed_bytes for session in sessions) <= MAX_ALL_CLOSED_BYTES
    assert len(small.closed) == 1
    assert min(len(session.closed) for session in others) >= 2


def test_nothing_is_counted_of_closed_slots_that_are_forgotten() -> None:
    sessions = Sessions(10, 5)
    for _ in range(2):
        session = sessions.create(0.0)
        for number in range(3):
            close_one(sessions, session, number, 1 << 20)
    sessions.remove(session)
    sessions.remove(session)
    sessions.forget_old(5.1)
    assert sessions._closed_weight == 0
    assert not any(session.closed for session in sessions)


def test_the_tokens_of_streams_count_in_what_is_kept_of_closed_slots(
    endpoint: str, engine: FakeEngine
) -> None:
    with serving(endpoint, engine) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        peer.send("stream", **seat(opened), max_steps=1000, credit=1000)
        while peer.receive()[0].get("more"):
            pass
        peer.ask("close", slot=opened["slot"], epoch=opened["epoch"])
        (session,) = running.server.sessions
        assert session.closed_bytes == 1000 * TOKEN_BYTES
