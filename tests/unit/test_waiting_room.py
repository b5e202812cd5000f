"""With a waiting room the newest work waits when the pool is full, and nothing of it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import crowd
from fakes import FakeEngine
from gates import slow_down, wait_until
from latentd_client import Client, Control
from serving import Peer, lapse, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from latentd.engine import Engine
    from serving import Running


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(pages=4, max_slots=3, buckets=(1, 2, 3))


@pytest.fixture
def running(endpoint: str, engine: FakeEngine) -> Iterator[Running]:
    with serving(endpoint, engine, max_waiting=8) as running:
        yield running


@pytest.fixture
def peer(running: Running) -> Iterator[Peer]:
    with Peer(running.endpoint) as peer:
        yield peer.hello()


def waiting(running: Running) -> int:
    return running.server._work.waiting.count


def close(peer: Peer, opened: dict[str, Any]) -> None:
    peer.send("close", slot=opened["slot"], epoch=opened["epoch"])


def read(peer: Peer, count: int) -> dict[int, dict[str, Any]]:
    return {header["id"]: header for header, _ in (peer.receive() for _ in range(count))}


def test_an_open_waits_for_pages_and_begins_when_a_slot_is_closed(
    peer: Peer, running: Running, engine: FakeEngine
) -> None:
    first = peer.open([1] * 200, key="a")
    late = peer.send("open", key="b", prompt=[2] * 70)
    wait_until(lambda: waiting(running) == 1)
    assert engine.slots.num_used == 1
    close(peer, first)
    reply = read(peer, 2)[late]
    assert (reply["status"], reply["token"]) == ("ok", engine.expected_token([2] * 70))


def test_an_open_waits_for_a_slot_and_is_found_by_its_key_meanwhile(
    peer: Peer, running: Running
) -> None:
    slots = [peer.open([1], key=str(number)) for number in range(3)]
    ids = [peer.send("open", key="late", prompt=[2]) for _ in range(2)]
    wait_until(lambda: waiting(running) == 1)
    close(peer, slots[0])
    found = read(peer, 3)
    assert [found[number]["status"] for number in ids] == ["ok", "ok"]
    assert found[ids[0]]["epoch"] == found[ids[1]]["epoch"]


@pytest.mark.parametrize("op", ["step", "verify", "stream"])
def test_what_an_open_slot_needs_waits_and_runs_once(
    peer: Peer, running: Running, engine: FakeEngine, op: str
) -> None:
    full = peer.open([1] * 64, key="a")
    other = peer.open([2] * 190, key="b")
    more: dict[str, dict[str, Any]] = {
        "step": {}, "verify": {"draft": [1]}, "stream": {"max_steps": 1, "credit": 1},
    }  # fmt: skip
    fields = more[op]
    late = peer.send(op, **seat(full), **fields)
    wait_until(lambda: waiting(running) == 1)
    busy = peer.ask("truncate", **seat(full), to=1)
    assert busy["status"] == "busy"
    close(peer, other)
    reply = read(peer, 2)[late]
    assert (reply["status"], reply["context_len"]) == ("ok", 65)
    again = peer.ask(op, **seat(full), **fields)
    assert (again["replayed"], again["context_len"]) == (True, 65)
    assert engine.slot(full["slot"], full["epoch"]).context_len == 65


def test_a_stream_that_meets_a_full_pool_goes_on_where_it_stood(
    peer: Peer, running: Running, engine: FakeEngine
) -> None:
    text = [1] * 60
    opened = peer.open(text, key="a")
    other = peer.open([2] * 190, key="b")
    tokens = [opened["token"]]
    expected = text + tokens
    for _ in range(40):
        expected.append(engine.expected_token(expected))
    stop = expected[63:66]  # it begins before the page is full, and ends behind it
    stream = peer.send("stream", **seat(opened), max_steps=30, credit=30, stop_sequences=[stop])
    wait_until(lambda: waiting(running) == 1)
    close(peer, other)
    last: dict[str, Any] = {}
    while not last.get("end"):
        header, _ = peer.receive()
        if header["id"] == stream:
            tokens += header["tokens"]
            last = header
    assert (last["end"], tokens) == ("stop", expected[60:66])


def test_a_prompt_that_meets_a_full_pool_begins_anew_and_its_pages_go_to_older_work(
    endpoint: str,
) -> None:
    engine = FakeEngine(pages=4, prefill_chunk=16)
    with serving(endpoint, engine, max_waiting=8) as running, Peer(endpoint) as peer:
        old = peer.hello().open([1] * 60, key="a")
        prompt = [2] * 180
        slow_down(engine, 0.01)
        stream = peer.send("stream", **seat(old), max_steps=60, credit=60)
        late = peer.send("open", key="b", prompt=prompt)
        ended = None
        while ended is None:
            header, _ = peer.receive()
            assert header["id"] == stream, "the prompt is not in"
            ended = header.get("end")
        assert ended == "max_steps"
        wait_until(lambda: waiting(running) == 1)
        close(peer, old)
        assert read(peer, 2)[late]["token"] == engine.expected_token(prompt)


def test_a_request_waits_for_its_deadline_only(peer: Peer, running: Running) -> None:
    peer.open([1] * 200, key="a")
    refused = peer.ask("open", key="b", prompt=[2] * 70, deadline_s=0.1)
    assert (refused["status"], waiting(running)) == ("deadline", 0)
    assert peer.ask("step", slot=0, epoch=1, pos=1)["status"] == "epoch_gone"


def test_what_can_never_fit_does_not_wait(peer: Peer, running: Running) -> None:
    peer.open([1] * 200, key="a")
    peer.send("open", key="b", prompt=[2] * 70)
    wait_until(lambda: waiting(running) == 1)
    refused = peer.ask("open", key="c", prompt=[3] * 300)
    assert (refused["status"], refused["pages_needed"]) == ("too_large", 5)
    assert peer.ask("open", key="d", prompt=[3] * 5000)["status"] == "context_full"


@pytest.mark.parametrize("op", ["open", "step", "stream"])
def test_what_waits_can_be_cancelled(peer: Peer, running: Running, op: str) -> None:
    full = peer.open([1] * 64, key="a")
    peer.open([2] * 190, key="b")
    fields: dict[str, Any] = seat(full)
    if op == "open":
        fields = {"key": "c", "prompt": [1]}
    if op == "stream":
        fields |= {"max_steps": 9, "credit": 9}
    late = peer.send(op, **fields)
    wait_until(lambda: waiting(running) == 1)
    cancel = peer.send("cancel", request=late)
    found = read(peer, 2)
    assert found[cancel]["known"]
    assert "cancelled" in (found[late]["status"], found[late].get("end"))
    assert waiting(running) == 0
    assert peer.ask("truncate", **seat(full), to=10)["status"] == "ok"


def test_closing_a_slot_ends_what_waits_on_it(peer: Peer, running: Running) -> None:
    full = peer.open([1] * 64, key="a")
    peer.open([2] * 190, key="b")
    late = peer.send("step", **seat(full))
    wait_until(lambda: waiting(running) == 1)
    close(peer, full)
    assert read(peer, 2)[late]["status"] == "epoch_gone"


def test_closing_a_session_and_a_lost_lease_end_what_waits_in_it(
    endpoint: str, engine: FakeEngine
) -> None:
    with (
        serving(endpoint, engine, max_waiting=8) as running,
        Peer(endpoint) as owner, Peer(endpoint) as other, Client(endpoint) as holder,
    ):  # fmt: skip
        holder.open([1] * 250)
        owner.hello().send("open", key="a", prompt=[1])
        other.hello().send("open", key="a", prompt=[1])
        wait_until(lambda: waiting(running) == 2)
        close = owner.send("close")
        found = read(owner, 2)
        assert found.pop(close)["status"] == "ok"
        assert [reply["status"] for reply in found.values()] == ["cancelled"]
        lapse(running, other.session)
        assert other.receive()[0]["status"] == "cancelled"


def test_a_draining_daemon_lets_nobody_wait(peer: Peer, running: Running) -> None:
    full = peer.open([1] * 64, key="a")
    peer.open([2] * 190, key="b")
    ids = [peer.send("step", **seat(full)), peer.send("open", key="c", prompt=[1])]
    wait_until(lambda: waiting(running) == 2)
    running.server.stop(5.0)
    found = read(peer, 2)
    assert [found[number]["status"] for number in ids] == ["draining", "draining"]


def test_where_all_slots_wait_for_each_other_the_newest_is_refused(
    peer: Peer, running: Running
) -> None:
    first, second = peer.open([1] * 128, key="a"), peer.open([2] * 128, key="b")
    ids = [peer.send("step", **seat(slot)) for slot in (first, second)]
    header, _ = peer.receive()
    assert (header["id"], header["status"]) == (ids[1], "no_pages")
    close(peer, second)
    assert read(peer, 2)[ids[0]]["context_len"] == 129


def test_an_open_that_fits_passes_one_that_does_not(peer: Peer, running: Running) -> None:
    peer.open([1] * 64, key="a")
    peer.send("open", key="b", prompt=[2] * 250)
    wait_until(lambda: waiting(running) == 1)
    assert peer.open([3] * 64, key="c")["status"] == "ok"
    assert waiting(running) == 1


def test_a_fork_waits_for_its_page_and_keeps_its_slot_busy(
    peer: Peer, running: Running, engine: FakeEngine
) -> None:
    slot, other = peer.open([1] * 63, key="a"), peer.open([2] * 190, key="b")
    forks = [peer.send("fork", **seat(slot), key="f") for _ in range(2)]
    wait_until(lambda: waiting(running) == 1)
    assert peer.ask("step", **seat(slot))["status"] == "busy"
    close(peer, other)
    found = read(peer, 3)
    first, second = (found[number] for number in forks)
    assert (first["status"], first["token"], first["context_len"]) == ("ok", slot["token"], 63)
    assert (second["epoch"], second["replayed"]) == (first["epoch"], True)
    step = peer.ask("step", **seat(first))
    assert step["token"] == engine.expected_token([1] * 63 + [slot["token"]])
    assert peer.ask("step", **seat(slot))["status"] == "ok"


@pytest.mark.parametrize("end", ["cancel", "close", "deadline"])
def test_a_fork_that_waits_ends_with_its_request_or_its_slot(
    peer: Peer, running: Running, end: str
) -> None:
    slot = peer.open([1] * 63, key="a")
    peer.open([2] * 190, key="b")
    deadline_s = 0.1 if end == "deadline" else 60.0
    fork = peer.send("fork", **seat(slot), key="f", deadline_s=deadline_s)
    if end != "deadline":
        wait_until(lambda: waiting(running) == 1)
    if end == "cancel":
        peer.send("cancel", request=fork)
    elif end == "close":
        close(peer, slot)
    status = {"cancel": "cancelled", "close": "epoch_gone", "deadline": "deadline"}[end]
    assert read(peer, 1 if end == "deadline" else 2)[fork]["status"] == status
    if end != "close":
        assert peer.ask("truncate", **seat(slot), to=3)["status"] == "ok"


def exported(peer: Peer, slot: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """A begin of the same sequence, and its raw frames: the tokens, and then a put's."""
    peer.send("export", **seat(slot), first=0, count=1, tokens=True)
    header, (pages, checksums, tokens) = peer.receive()
    begin = {name: header[name] for name in ("geometry", "fingerprint", "token")}
    return {**begin, "tokens": {"raw": 0}}, [tokens, pages, checksums]


def test_the_begin_of_an_adoption_waits_for_its_pages(peer: Peer, running: Running) -> None:
    slot, other = peer.open([1] * 60, key="a"), peer.open([2] * 190, key="b")
    begin, (tokens, *page) = exported(peer, slot)
    begun = peer.send("adopt", [tokens], key="d", begin=begin)
    wait_until(lambda: waiting(running) == 1)
    close(peer, other)
    assert read(peer, 2)[begun]["pages"] == 1
    put = {"first": 0, "pages": {"raw": 0}, "checksums": {"raw": 1}}
    assert peer.ask("adopt", page, key="d", put=put)["missing"] == 0
    assert peer.ask("adopt", key="d", commit=True)["context_len"] == 60


def test_a_fork_or_an_adoption_that_can_never_be_is_refused_though_others_wait(
    peer: Peer, running: Running
) -> None:
    slot = peer.open([1] * 60, key="a")
    for key in ("b", "g"):
        peer.open([2], key=key)
    begin, (tokens, *_) = exported(peer, slot)
    peer.send("open", key="c", prompt=[3])
    wait_until(lambda: waiting(running) == 1)
    fork = peer.ask("fork", key="d", **{**seat(slot), "pos": 9})
    assert (fork["status"], fork["context_len"]) == ("position_conflict", 60)
    long = np.ones(300, np.int32)
    assert peer.ask("adopt", [long], key="e", begin=begin)["status"] == "too_large"
    wrong = {**begin, "token": 999}
    assert peer.ask("adopt", [tokens], key="f", begin=wrong)["status"] == "invalid"
    assert waiting(running) == 1


def test_an_adoption_that_waits_can_be_dropped(peer: Peer, running: Running) -> None:
    slot = peer.open([1] * 60, key="a")
    peer.open([2] * 190, key="b")
    begin, (tokens, *_) = exported(peer, slot)
    begun = peer.send("adopt", [tokens], key="d", begin=begin)
    wait_until(lambda: waiting(running) == 1)
    drop = peer.send("adopt", key="d", drop=True)
    found = read(peer, 2)
    assert (found[begun]["status"], found[drop]["known"]) == ("cancelled", True)
    assert waiting(running) == 0


def test_the_figures_tell_who_waits_and_who_was_let_in(peer: Peer, running: Running) -> None:
    first = peer.open([1] * 200, key="a")
    late = peer.send("open", key="b", prompt=[2] * 70)
    wait_until(lambda: waiting(running) == 1)
    with Control(running.server.control_endpoint) as control:
        assert control.stats()["server"]["waiting"] == 1
        close(peer, first)
        assert read(peer, 2)[late]["status"] == "ok"
        wait_until(lambda: control.stats()["server"]["admitted_late"] == 1)


@pytest.mark.parametrize("cache", [False, True])
def test_many_clients_get_their_texts_from_a_pool_too_small_for_them(
    endpoint: str, cache: bool
) -> None:
    happened = crowd.run(endpoint, 1, 15, cache)
    assert min(happened["written"], happened["waited"]) > 20, happened


def test_a_stream_that_waited_in_the_middle_has_the_bits_of_one_that_did_not(
    endpoint: str, start: Callable[..., Engine]
) -> None:
    engine = start(max_slots=2, kv_pages=5)
    sampling = {"temperature": 1.0, "seed": 7}
    found = []
    with serving(endpoint, engine, max_waiting=8) as running, Peer(endpoint) as peer:
        peer.hello()
        for number, is_full in enumerate((False, True)):
            slot = peer.open([5] * 60, key=f"a{number}", sampling=sampling)
            other = peer.open([2] * 200, key=f"b{number}") if is_full else None
            stream = peer.send("stream", **seat(slot), max_steps=20, credit=20)
            if other is not None:
                wait_until(lambda: waiting(running) == 1)
                close(peer, other)
            tokens: list[int] = []
            logprobs: list[float] = []
            last: dict[str, Any] = {}
            while not last.get("end"):
                header, _ = peer.receive()
                if header["id"] == stream:
                    tokens += header["tokens"]
                    logprobs += header["logprobs"]
                    last = header
            found.append((tokens, logprobs, last["end"], last["context_len"]))
            peer.ask("close", slot=slot["slot"], epoch=slot["epoch"])
    assert found[0] == found[1]
    assert found[0][2:] == ("max_steps", 80)
