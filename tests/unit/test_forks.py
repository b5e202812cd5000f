"""What fork and truncate share, copy, refuse and leave alone, on the fake backend and the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_calls import GREEDY, admit_step, open_slot, refused, run_all, step
from fakes import FakeEngine
from latentd.engine_transfer import MAX_MOVES
from latentd.operations import SamplingParams, StreamRequest
from serving import Peer, seat

if TYPE_CHECKING:
    pass


def test_a_fork_takes_one_page_however_long_the_context() -> None:
    for length, pages in ((0, 0), (64, 0), (65, 1), (4000, 1), (3968, 0)):
        engine = FakeEngine()
        slot = open_slot(engine, [n % 256 for n in range(length)])
        used = engine.slots.pool.num_used
        engine.fork(slot.slot_id, slot.epoch, length, None)
        assert engine.slots.pool.num_used - used == pages
        moves = engine.slots.changes.take_moves()
        assert len(moves.copies if moves is not None else []) == pages
        engine.slots.check()


def test_source_and_fork_go_their_own_ways() -> None:
    engine = FakeEngine()
    prompt = [n % 256 for n in range(100)]
    slot = open_slot(engine, prompt)
    fork = engine.fork(slot.slot_id, slot.epoch, 100, None)
    assert (fork.context_len, fork.token, fork.busy) == (100, engine.expected_token(prompt), False)
    for n in range(100):
        assert step(engine, slot, 100 + n, 1).token == engine.expected_token(prompt + [1] * (n + 1))
        assert step(engine, fork, 100 + n, 2).token == engine.expected_token(prompt + [2] * (n + 1))
    assert engine.stats()["forks"] == 1


def test_a_fork_outlives_its_source_whose_pages_go_to_others_at_once() -> None:
    engine = FakeEngine(pages=5)
    prompt = [n % 256 for n in range(130)]
    slot = open_slot(engine, prompt)
    fork = engine.fork(slot.slot_id, slot.epoch, 130, None)
    engine.close(slot.slot_id, slot.epoch)
    open_slot(engine, [9] * 127)  # takes the free pages, the source's last one among them
    assert engine.slots.pool.num_free == 0
    assert step(engine, fork, 130, 5).token == engine.expected_token([*prompt, 5])
    engine.close(fork.slot_id, fork.epoch)
    assert engine.stats()["kv_pages_used"] == 2


def test_forks_of_forks_that_are_closed_before_any_step_leave_nothing() -> None:
    engine = FakeEngine(pages=4)
    prompt = [n % 256 for n in range(70)]
    slot = open_slot(engine, prompt)
    first = engine.fork(slot.slot_id, slot.epoch, 70, None)
    second = engine.fork(first.slot_id, first.epoch, 70, None)
    engine.close(first.slot_id, first.epoch)
    third = engine.fork(second.slot_id, second.epoch, 70, None)  # copies into the page of the first
    engine.close(slot.slot_id, slot.epoch)
    engine.close(second.slot_id, second.epoch)
    assert step(engine, third, 70, 3).token == engine.expected_token([*prompt, 3])
    engine.close(third.slot_id, third.epoch)
    assert engine.stats()["kv_pages_used"] == engine.stats()["slots_used"] == 0


def test_a_fork_has_its_own_sampling_or_that_of_its_source() -> None:
    engine = FakeEngine()
    hot = SamplingParams(temperature=1.0)
    slot = engine.admit_open([1, 2], hot, False)
    run_all(engine)
    seat = slot.slot_id, slot.epoch
    assert engine.fork(*seat, 2, None).seed == slot.sampling.seed
    assert engine.fork(*seat, 2, SamplingParams(1.0, seed=5)).seed == 5
    drawn = {engine.fork(*seat, 2, hot).seed for _ in range(3)}
    assert len(drawn | {slot.sampling.seed}) == 4
    refused("invalid", lambda: engine.fork(*seat, 2, SamplingParams(top_p=2.0)))


def test_a_refused_fork_changes_nothing() -> None:
    engine = FakeEngine(max_slots=2, buckets=(1, 2), pages=3, prefill_chunk=16)
    slot = open_slot(engine, [1] * 70)
    seat = slot.slot_id, slot.epoch
    conflict = refused("position_conflict", lambda: engine.fork(*seat, 71, None))
    assert conflict.detail == {"context_len": 70}
    refused("epoch_gone", lambda: engine.fork(slot.slot_id, slot.epoch + 1, 70, None))
    other = engine.admit_open([2] * 60, GREEDY, False)  # the last page is promised to it
    refused("no_pages", lambda: engine.fork(*seat, 70, None))
    run_all(engine)
    refused("no_pages", lambda: engine.fork(*seat, 70, None))
    engine.truncate(*seat, 70, 64)
    refused("no_slot", lambda: engine.fork(*seat, 64, None))
    engine.close(other.slot_id, other.epoch)
    admit_step(engine, *seat, 64, 1)
    refused("busy", lambda: engine.fork(*seat, 64, None))
    run_all(engine)
    assert engine.stats()["slots_used"] == 1


def test_who_writes_into_a_shared_page_gets_a_copy_first() -> None:
    engine = FakeEngine(pages=3)
    prompt = [n % 256 for n in range(128)]
    slot = open_slot(engine, prompt)
    fork = engine.fork(slot.slot_id, slot.epoch, 128, None)
    engine.truncate(fork.slot_id, fork.epoch, 128, 70)
    assert engine.slots.pool.num_used == 2
    assert step(engine, fork, 70, 9).token == engine.expected_token([*prompt[:70], 9])
    assert engine.slots.pool.num_used == 3
    refused("no_pages", lambda: step(engine, slot, 128, 4))
    engine.close(fork.slot_id, fork.epoch)
    assert step(engine, slot, 128, 4).token == engine.expected_token([*prompt, 4])


def test_a_write_into_a_shared_page_waits_for_a_page() -> None:
    engine = FakeEngine(pages=3)
    prompt = [n % 256 for n in range(128)]
    slot = open_slot(engine, prompt)
    fork = engine.fork(slot.slot_id, slot.epoch, 128, None)
    engine.truncate(fork.slot_id, fork.epoch, 128, 70)
    other = open_slot(engine, [3])
    refused("no_pages", lambda: step(engine, fork, 70, 9))
    stream = StreamRequest(slot.slot_id, slot.epoch, 128, 5, frozenset(), 9)
    refused("no_pages", lambda: engine.admit_stream(stream, None, None))
    engine.slots.check()
    engine.close(other.slot_id, other.epoch)
    assert step(engine, fork, 70, 9).token == engine.expected_token([*prompt[:70], 9])


def test_the_last_owner_of_a_page_writes_into_it_without_a_copy() -> None:
    engine = FakeEngine(pages=2)
    prompt = [n % 256 for n in range(128)]
    slot = open_slot(engine, prompt)
    fork = engine.fork(slot.slot_id, slot.epoch, 128, None)
    engine.truncate(fork.slot_id, fork.epoch, 128, 70)
    engine.close(slot.slot_id, slot.epoch)
    assert step(engine, fork, 70, 9).token == engine.expected_token([*prompt[:70], 9])


def test_a_fork_is_repeated_by_its_key_and_made_once(peer: Peer) -> None:
    opened = peer.open(sampling={"temperature": 1.0, "seed": 7})
    fields = {**seat(opened), "key": "f", "sampling": {"temperature": 1.0, "seed": 8}}
    fork = peer.ask("fork", **fields)
    assert (fork["context_len"], fork["token"], fork["seed"]) == (3, opened["token"], 8)
    peer.ask("step", **seat(opened))
    again = peer.ask("fork", **fields)
    assert again.pop("replayed")
    assert {**again, "id": fork["id"]} == fork
    assert len(peer.ask("resume")["slots"]) == 2
    assert peer.ask("step", **seat(fork))["context_len"] == 4
    assert peer.ask("fork", **{**fields, "key": "g"})["status"] == "position_conflict"


def test_a_key_names_one_open_or_fork(peer: Peer) -> None:
    opened = peer.open(key="k")
    fork = {**seat(opened), "key": "f"}
    assert peer.ask("fork", **{**fork, "key": "k"})["status"] == "invalid"
    assert peer.ask("fork", **fork)["status"] == "ok"
    assert peer.ask("fork", **fork, sampling={"seed": 1})["status"] == "invalid"
    assert peer.open(key="f")["status"] == "invalid"


def test_a_fork_of_a_running_slot_or_of_another_session_is_refused(peer: Peer) -> None:
    opened = peer.open()
    peer.send("stream", **seat(opened), max_steps=500, credit=1)
    peer.receive()
    assert peer.ask("fork", **seat(opened), key="f")["status"] == "busy"
    mine, peer.session = peer.session, peer.ask("hello", session=None, versions=[1, 1])["session"]
    assert peer.ask("fork", **seat(opened), key="f")["status"] == "epoch_gone"
    peer.session = mine
    assert peer.ask("close")["status"] == "ok"


def test_forks_that_come_and_go_leave_few_copies_to_the_next_step() -> None:
    engine = FakeEngine()
    slot = open_slot(engine, [7] * 100)
    before = engine.fake.copies
    for _ in range(500):
        fork = engine.fork(slot.slot_id, slot.epoch, 100, None)
        engine.close(fork.slot_id, fork.epoch)
    moves = engine.slots.changes.take_moves()
    assert moves is not None
    assert len(moves.copies) <= MAX_MOVES
    assert engine.fake.copies - before + len(moves.copies) == 500
