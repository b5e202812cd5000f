"""Deadlines and cancels of what has not begun: it leaves no trace, and what has begun goes on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from engine_calls import GREEDY, admit_step, open_slot, run_all
from fakes import FakeEngine
from gates import Gate, slow_down
from latentd import intake
from latentd.operations import (
    Failed,
    SamplingParams,
    StepRequest,
    StreamRequest,
    StreamTokens,
    VerifyRequest,
)
from serving import Peer, arriving, seat, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latentd.operations import Reason, Request
    from serving import Running

NONE: frozenset[int] = frozenset()
WARM = SamplingParams(temperature=1.0, seed=5)


def admit(engine: FakeEngine, op: str, slot_id: int, epoch: int) -> Request:
    """One operation at the length 64, on a page of its own and with another sampling."""
    at = (slot_id, epoch, 64)
    if op == "step":
        return admit_step(engine, *at, None, WARM, False)
    if op == "stream":
        return engine.admit_stream(StreamRequest(*at, 9, NONE, 9), None, WARM)
    return engine.admit_verify(VerifyRequest(*at, (1, 2), NONE), None, WARM)


@pytest.mark.parametrize("reason", ["deadline", "cancelled"])
@pytest.mark.parametrize("op", ["step", "stream", "verify"])
def test_what_is_taken_back_before_its_launch_leaves_its_slot_as_it_was(
    op: str, reason: Reason
) -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1] * 64)
    used = engine.stats()["kv_pages_used"]
    request = admit(engine, op, slot.slot_id, slot.epoch)
    engine.cancel(request, reason)
    (event,) = run_all(engine)
    if op == "stream" and reason == "cancelled":
        assert isinstance(event, StreamTokens)
        assert (event.request, event.end, event.tokens) == (request, "cancelled", [])
        return
    assert isinstance(event, Failed)
    assert (event.request, event.code) == (request, reason)
    assert engine.stats()["kv_pages_used"] == used
    assert not engine.slot(slot.slot_id, slot.epoch).busy
    admit_step(engine, slot.slot_id, slot.epoch, 64)
    (done,) = run_all(engine)
    assert isinstance(done, StepRequest)
    first = engine.expected_token([1] * 64)
    assert done.token == engine.expected_token([1] * 64 + [first]), "its sampling is still there"


@pytest.mark.parametrize("op", ["step", "stream", "verify"])
def test_what_is_launched_is_not_taken_back_when_its_time_is_over(op: str) -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [1] * 64)
    request = admit(engine, op, slot.slot_id, slot.epoch)
    engine.launch()
    engine.cancel(request, "deadline")
    events = run_all(engine)
    assert not any(isinstance(event, Failed) for event in events)
    assert engine.slot(slot.slot_id, slot.epoch).context_len > 64


def test_a_prompt_is_dropped_between_two_chunks_when_its_time_is_over() -> None:
    engine = FakeEngine(prefill_chunk=16)
    request = engine.admit_open([1] * 100, GREEDY, False)
    engine.run()
    engine.cancel(request, "deadline")
    (failed,) = run_all(engine)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == (
        "deadline", "the time was over before the prompt was in",
    )  # fmt: skip
    assert engine.slots.num_used == 0


@pytest.fixture
def running(
    endpoint: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    """Whatever has arrived during a launch is taken behind it, however long that takes."""
    for name in ("TAKE_S", "SPARE_SHARE"):
        monkeypatch.setattr(intake, name, 600.0)
    with serving(endpoint, engine) as running:
        yield running


@pytest.fixture
def peer(running: Running) -> Iterator[Peer]:
    with Peer(running.endpoint) as peer:
        yield peer.hello()


@pytest.fixture
def queue(peer: Peer, engine: FakeEngine) -> list[dict[str, Any]]:
    """Five slots whose drafts take a launch of 0.3 s each: the last one waits."""
    opened = [peer.open(key=str(number)) for number in range(5)]
    slow_down(engine, 0.3)
    return opened


@contextlib.contextmanager
def behind_a_draft(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> Iterator[int]:
    """What is sent within is there, all of it, when the draft of the first slot has run; the id of
    that."""
    gate = Gate(engine)
    gate.shut()
    first = draft(peer, queue[0])
    with arriving(running, peer):
        yield first
    gate.open()


def draft(peer: Peer, slot: dict[str, Any], deadline_s: float = 60.0) -> int:
    """Send one that fills a launch."""
    return peer.send("verify", **seat(slot), draft=[1] * 7, deadline_s=deadline_s)


def replies(peer: Peer, count: int) -> dict[int, dict[str, Any]]:
    return {header["id"]: header for header, _ in (peer.receive() for _ in range(count))}


def test_a_draft_whose_time_is_over_while_it_waits_is_refused_and_may_come_again(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> None:
    with behind_a_draft(running, peer, queue, engine) as first:
        ids = [first, *(draft(peer, slot) for slot in queue[1:4])]
        late = draft(peer, queue[4], deadline_s=0.2)
    found = replies(peer, 5)
    assert [found[number]["status"] for number in ids] == ["ok"] * 4
    assert found[late]["status"] == "deadline"
    again = peer.ask("verify", **seat(queue[4]), draft=[1] * 7, deadline_s=9.0)
    assert (again["status"], again.get("replayed")) == ("ok", None)


def test_a_draft_that_waits_has_the_time_of_its_last_repetition(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> None:
    with behind_a_draft(running, peer, queue, engine):
        for slot in queue[1:4]:
            draft(peer, slot)
        last = draft(peer, queue[4], deadline_s=0.2)
        again = draft(peer, queue[4], deadline_s=60.0)
    found = replies(peer, 6)
    assert (found[last]["status"], found[again]["status"]) == ("ok", "ok")


def test_a_draft_that_waits_can_be_cancelled_by_its_request(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> None:
    with behind_a_draft(running, peer, queue, engine) as first:
        *_, last = [draft(peer, slot) for slot in queue[1:]]
        cancels = [peer.send("cancel", request=number) for number in (last, first, 999)]
    found = replies(peer, 8)
    assert (found[last]["status"], found[first]["status"]) == ("cancelled", "ok")
    assert found[cancels[0]]["known"]
    assert not found[cancels[2]]["known"]


def test_a_repetition_right_behind_the_cancel_runs_for_itself(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> None:
    with behind_a_draft(running, peer, queue, engine):
        *_, last = [draft(peer, slot) for slot in queue[1:]]
        cancel = peer.send("cancel", request=last)
        again = draft(peer, queue[4])
    found = replies(peer, 7)
    assert (found[last]["status"], found[cancel]["known"]) == ("cancelled", True)
    assert (found[again]["status"], found[again].get("replayed")) == ("ok", None)


def test_an_open_of_the_same_key_right_behind_the_cancel_gets_a_slot(
    running: Running, peer: Peer, queue: list[dict[str, Any]], engine: FakeEngine
) -> None:
    used = len(queue)
    with behind_a_draft(running, peer, queue, engine):
        first = peer.send("open", key="a", prompt=[1] * 300)
        peer.send("cancel", request=first)
        second = peer.send("open", key="a", prompt=[1] * 300)
    found = replies(peer, 4)
    assert (found[first]["status"], found[second]["status"]) == ("cancelled", "ok")
    assert engine.slots.num_used == used + 1
