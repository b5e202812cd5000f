"""Clients that step in turn meet in one replay, and nobody else waits for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from fakes import FakeEngine
from gates import slow_down
from latentd import gather
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from latentd.engine_protocol import EngineProtocol

STEP_S = 0.02


class SlowEngine(FakeEngine):
    """Its steps take STEP_S, long enough for another client to ask meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        slow_down(self, STEP_S)


def step(peer: Peer, opened: dict[str, int], steps: int) -> None:
    where = seat(opened)
    for _ in range(steps):
        assert peer.ask("step", **where)["status"] == "ok"
        where["pos"] += 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that a busy machine cannot miss."""
    monkeypatch.setattr(gather, "SHARE", 1000.0)
    monkeypatch.setattr(gather, "MAX_WAIT_S", 5.0)


@pytest.mark.usefixtures("patient")
def test_two_clients_that_step_in_turn_share_their_launches(endpoint: str) -> None:
    engine = SlowEngine()
    with serving(endpoint, engine, spin_us=200), Peer(endpoint) as one, Peer(endpoint) as two:
        rows = [(peer, seat(peer.hello().open())) for peer in (one, two)]
        before = engine.fake.launches
        for peer, where in rows:
            peer.send("step", **where)
        for _ in range(19):
            for peer, where in rows:
                assert peer.receive()[0]["status"] == "ok"
                where["pos"] += 1
                peer.send("step", **where)
        assert one.receive()[0]["status"] == two.receive()[0]["status"] == "ok"
    assert engine.fake.launches - before <= 22  # 40 when each runs alone


@pytest.mark.usefixtures("patient")
def test_who_steps_beside_a_stream_is_in_every_second_launch(endpoint: str) -> None:
    engine = SlowEngine()
    with serving(endpoint, engine, spin_us=200), Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(key="a"), two.hello().open(key="b")
        one.send("stream", **seat(first), max_steps=500, credit=500)
        step(two, second, 1)
        before = engine.fake.launches
        step(two, {**second, "context_len": second["context_len"] + 1}, 15)
        assert engine.fake.launches - before <= 33


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("goes", ["closes its slot", "streams"])
def test_who_will_not_step_again_is_not_waited_for(endpoint: str, goes: str) -> None:
    with serving(endpoint, SlowEngine(), spin_us=200), Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(key="a"), two.hello().open(key="b")
        row = seat(first)
        one.send("step", rows=[row])
        step(two, second, 1)
        one.receive()
        row["pos"] += 1
        if goes == "streams":
            one.send("stream", **row, max_steps=1, credit=1)
        else:
            one.ask("close", slot=row["slot"], epoch=row["epoch"])
        start = time.monotonic()
        step(two, {**second, "context_len": second["context_len"] + 1}, 1)
        assert time.monotonic() - start < gather.MAX_WAIT_S / 2


def test_a_client_that_thinks_costs_the_others_a_part_of_one_step(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, waits = set[float](), gather.Gather.waits

    def noted(window: gather.Gather, engine: EngineProtocol, now: float) -> bool:
        if does_wait := waits(window, engine, now):
            ends.add(window.until)
        return does_wait

    monkeypatch.setattr(gather.Gather, "waits", noted)
    with serving(endpoint, SlowEngine(), spin_us=200), Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(key="a"), two.hello().open(key="b")
        one.send("step", **seat(first))
        step(two, second, 20)  # the other one thinks meanwhile
    assert len(ends) <= 1


@pytest.mark.usefixtures("patient")
def test_a_daemon_that_may_not_poll_waits_for_nobody(endpoint: str) -> None:
    with serving(endpoint, SlowEngine(), spin_us=0), Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(key="a"), two.hello().open(key="b")
        one.send("step", **seat(first))
        step(two, second, 1)
        start = time.monotonic()
        step(two, {**second, "context_len": second["context_len"] + 1}, 1)
        assert time.monotonic() - start < gather.MAX_WAIT_S / 2


def test_the_wait_is_a_part_of_the_step_and_bounded() -> None:
    window = gather.Gather(True)
    window.answered(started=10.0, now=10.001)
    assert window.until == pytest.approx(10.001 + 0.15e-3)
    window.answered(started=10.0, now=11.0)
    assert window.until == pytest.approx(11.0 + 500e-6)
