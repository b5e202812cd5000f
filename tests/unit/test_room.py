"""Who came first has the pages it was promised; who came last yields."""

from __future__ import annotations

from engine_calls import GREEDY, admit_step, open_slot, refused, run_all
from fakes import FakeEngine
from latentd.operations import OpenDone, StreamRequest, StreamTokens, VerifyRequest

NONE: frozenset[int] = frozenset()


def test_a_step_leaves_the_pages_that_a_prompt_before_it_still_needs() -> None:
    engine = FakeEngine(pages=4, prefill_chunk=64)
    other = open_slot(engine, [1] * 64)
    prompt = engine.admit_open([2] * 192, GREEDY, False)
    refusal = refused(
        "no_pages",
        lambda: admit_step(engine, other.slot_id, other.epoch, 64),
    )
    assert refusal.detail == {"pages_needed": 1, "pages_free": 0, "pages_total": 4}
    seat = (other.slot_id, other.epoch, 64)
    refused("no_pages", lambda: engine.admit_verify(VerifyRequest(*seat, (1,), NONE), None, None))
    refused("no_pages", lambda: engine.admit_stream(StreamRequest(*seat, 9, NONE, 9), None, None))
    (done,) = run_all(engine)
    assert isinstance(done, OpenDone)
    assert done.request is prompt
    assert engine.slot(other.slot_id, other.epoch).context_len == 64


def test_a_stream_that_began_after_a_prompt_yields_to_it_and_keeps_its_tokens() -> None:
    engine = FakeEngine(pages=4, prefill_chunk=16)
    other = open_slot(engine, [1] * 62)
    prompt = engine.admit_open([2] * 192, GREEDY, False)
    request = StreamRequest(other.slot_id, other.epoch, 62, 9, NONE, 9)
    engine.admit_stream(request, None, None)
    events = run_all(engine)
    tokens = [event for event in events if isinstance(event, StreamTokens)]
    assert (tokens[-1].end, tokens[-1].context_len) == ("no_pages", 64)
    assert [event.request for event in events if isinstance(event, OpenDone)] == [prompt]


def test_a_prompt_larger_than_the_pool_is_refused_before_all_else() -> None:
    engine = FakeEngine(pages=2, max_slots=1, buckets=(1,))
    open_slot(engine, [1])
    refusal = refused("too_large", lambda: engine.admit_open([1] * 129, GREEDY, False))
    assert refusal.detail == {"pages_needed": 3, "pages_total": 2}
    refusal = refused("no_slot", lambda: engine.admit_open([1] * 128, GREEDY, False))
    assert refusal.detail == {"slots_total": 1}


def test_the_room_left_is_what_nobody_was_promised() -> None:
    engine = FakeEngine(pages=10, prefill_chunk=64)
    open_slot(engine, [1] * 64)
    assert engine.room == (7, 9)
    engine.admit_open([2] * 192, GREEDY, False)
    assert engine.room == (6, 6)
    run_all(engine)
    assert engine.room == (6, 6)
