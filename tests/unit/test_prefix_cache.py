"""What the prefix cache finds, keeps and gives up, on the fake backend and the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engine_calls import admit_step
from fakes import FakeEngine
from latentd.operations import OpenDone, SamplingParams, StreamRequest
from latentd_client.errors import RequestRejected
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd.operations import OpenRequest
    from serving import Running

    Connect = Callable[..., Any]

GREEDY = SamplingParams()
LONG = [n * n % 256 for n in range(400)]


def run_all(engine: FakeEngine) -> list[object]:
    events: list[object] = []
    while engine.has_work:
        events += engine.run()
        check(engine)
    return events


def check(engine: FakeEngine) -> None:
    engine.slots.check()
    if engine.sharing.cache is not None:
        engine.sharing.cache.check()


def open_slot(engine: FakeEngine, prompt: Sequence[int], salt: str = "") -> OpenRequest:
    request = engine.admit_open(prompt, GREEDY, False, salt)
    done = run_all(engine)[-1]
    assert isinstance(done, OpenDone)
    assert done.token == engine.expected_token(prompt)
    return request


def close(engine: FakeEngine, *slots: OpenRequest) -> None:
    for slot in slots:
        engine.close(slot.slot_id, slot.epoch)
        check(engine)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_prompt_begins_on_the_pages_of_an_earlier_one(is_closed: bool) -> None:
    engine = FakeEngine(cache=True)
    first = open_slot(engine, LONG)
    assert first.cached_tokens == 0
    if is_closed:
        close(engine, first)
    assert open_slot(engine, [*LONG[:200], 7, 8]).cached_tokens == 192
    assert open_slot(engine, [7, *LONG]).cached_tokens == 0
    stats = engine.stats()
    found = stats["prefix_queries"], stats["prefix_hits"], stats["prefix_hit_tokens"]
    assert found == (3, 1, 192)
    assert stats["prompt_tokens"] == 400 + 10 + 401


@pytest.mark.parametrize(("length", "cached"), [(64, 0), (65, 64), (128, 64), (129, 128)])
def test_a_hit_leaves_at_least_one_token_to_be_computed(length: int, cached: int) -> None:
    engine = FakeEngine(cache=True)
    open_slot(engine, LONG)
    assert open_slot(engine, LONG[:length]).cached_tokens == cached


def test_pages_filled_by_steps_and_streams_count() -> None:
    engine = FakeEngine(cache=True)
    slot = open_slot(engine, LONG[:60])
    for pos in range(60, 66):
        admit_step(engine, slot.slot_id, slot.epoch, pos, LONG[pos])
        run_all(engine)
    tokens = [*LONG[:66], engine.expected_token(LONG[:66])]
    stream = StreamRequest(slot.slot_id, slot.epoch, 66, 62, frozenset(), 99)
    engine.admit_stream(stream, None, None)
    run_all(engine)  # ends with the last token of a page
    while len(tokens) < 128:
        tokens.append(engine.expected_token(tokens))
    close(engine, slot)
    assert open_slot(engine, [*tokens, 1]).cached_tokens == 128


def test_a_prompt_that_waited_finds_what_was_computed_meanwhile() -> None:
    engine = FakeEngine(cache=True, prefill_chunk=64)
    requests = [engine.admit_open(LONG, GREEDY, False) for _ in range(3)]
    run_all(engine)
    assert [request.cached_tokens for request in requests] == [0, 384, 384]
    assert engine.stats()["kv_pages_used"] == 6 + 3


def test_prompts_of_another_salt_find_nothing() -> None:
    engine = FakeEngine(cache=True)
    for salt in ("", "a", "b"):
        assert open_slot(engine, LONG, salt).cached_tokens == 0
    for salt in ("", "a", "b"):
        assert open_slot(engine, LONG, salt).cached_tokens == 384


def test_a_fork_keeps_the_salt_and_its_pages_can_be_found() -> None:
    engine = FakeEngine(cache=True)
    slot = open_slot(engine, LONG[:100], "a")
    fork = engine.fork(slot.slot_id, slot.epoch, 100, None)
    for pos in range(100, 130):
        admit_step(engine, fork.slot_id, fork.epoch, pos, LONG[pos])
        run_all(engine)
    assert open_slot(engine, LONG[:150], "a").cached_tokens == 128
    assert open_slot(engine, LONG[:150]).cached_tokens == 0


def test_the_tail_of_a_truncate_is_found_and_the_new_one_is_another() -> None:
    engine = FakeEngine(cache=True)
    slot = open_slot(engine, LONG[:200])
    engine.truncate(slot.slot_id, slot.epoch, 200, 70)
    for pos in range(70, 140):
        admit_step(engine, slot.slot_id, slot.epoch, pos, 9)
        run_all(engine)
    assert open_slot(engine, LONG[:200]).cached_tokens == 192
    assert open_slot(engine, [*LONG[:70], *[9] * 80]).cached_tokens == 128


def test_the_least_recently_used_pages_go_first_and_only_when_pages_are_needed() -> None:
    engine = FakeEngine(pages=8, cache=True)
    prompts = [[n] * 129 for n in range(2)]
    for prompt in (*prompts, prompts[0]):
        close(engine, open_slot(engine, prompt))
    stats = engine.stats()
    assert (stats["kv_pages_cached"], stats["kv_pages_used"], stats["kv_pages_evicted"]) == (
        4,
        0,
        0,
    )
    big = open_slot(engine, [5] * 330)  # four free pages and the two of the second prompt
    assert engine.stats()["kv_pages_evicted"] == 2
    close(engine, big)
    assert open_slot(engine, prompts[0]).cached_tokens == 128
    assert open_slot(engine, prompts[1]).cached_tokens == 0


def test_of_one_sequence_the_end_goes_before_the_beginning() -> None:
    engine = FakeEngine(pages=6, cache=True)
    close(engine, open_slot(engine, LONG[:330]))
    close(engine, open_slot(engine, [1] * 130))  # one free page and two of the first one's end
    assert engine.stats()["kv_pages_evicted"] == 2
    assert open_slot(engine, LONG[:330]).cached_tokens == 192


def test_pages_in_use_are_never_given_away() -> None:
    engine = FakeEngine(pages=4, cache=True)
    slot = open_slot(engine, LONG[:129])
    with pytest.raises(RequestRejected, match="needs 3 pages; 1 of 4"):
        engine.admit_open([1] * 130, GREEDY, False)
    other = open_slot(engine, LONG[:128])  # needs one page beside the shared one
    assert engine.stats()["kv_pages_used"] == 4
    close(engine, slot, other)
    assert engine.stats()["kv_pages_used"] == 0
    open_slot(engine, [1] * 255)


def test_who_writes_into_a_kept_page_gets_a_copy_or_the_page_itself() -> None:
    for pages, cached in ((4, 64), (2, 0)):  # without a page for the copy the cache gives it up
        engine = FakeEngine(pages=pages, max_ctx=128, cache=True)
        slot = open_slot(engine, LONG[:127])
        admit_step(engine, slot.slot_id, slot.epoch, 127, LONG[127])
        run_all(engine)
        engine.truncate(slot.slot_id, slot.epoch, 128, 5)
        other = open_slot(engine, [3])  # takes a page, in a pool of two the last one
        admit_step(engine, slot.slot_id, slot.epoch, 5, 200)
        (done,) = run_all(engine)
        assert done.token == engine.expected_token([*LONG[:5], 200])  # type: ignore[attr-defined]
        close(engine, slot, other)
        assert open_slot(engine, LONG[:66]).cached_tokens == cached


def test_a_refused_prompt_gives_back_the_pages_that_it_found() -> None:
    engine = FakeEngine(pages=4, cache=True)
    slot = open_slot(engine, LONG[:128])
    with pytest.raises(RequestRejected):
        engine.admit_open(LONG[:300], GREEDY, False)
    check(engine)
    assert engine.stats()["kv_pages_used"] == 2
    assert engine.stats()["slots_used"] == 1
    assert engine.stats()["prefix_queries"] == 1
    close(engine, slot)


def test_without_a_cache_nothing_is_found_and_nothing_kept() -> None:
    engine = FakeEngine()
    for _ in range(2):
        slot = open_slot(engine, LONG)
        assert slot.cached_tokens == 0
        close(engine, slot)
    stats = engine.stats()
    assert (stats["prefix_queries"], stats["kv_pages_cached"]) == (0, 0)
    assert len(engine.slots.pool.free_pages()) == engine.slots.pool.num_pages


def test_the_reply_to_open_tells_what_was_found(endpoint: str) -> None:
    with serving(endpoint, FakeEngine(cache=True)), Peer(endpoint) as peer:
        peer.hello()
        assert peer.open(LONG, key="a")["cached_tokens"] == 0
        assert peer.open(LONG, key="b")["cached_tokens"] == 384
        salted = peer.open(LONG, key="c", salt="mine")
        assert salted["cached_tokens"] == 0
        assert peer.open(LONG, key="c", salt="mine")["replayed"]
        assert peer.open(LONG, key="c")["status"] == "invalid"
        assert peer.open(LONG, key="d", salt="x" * 65)["status"] == "invalid"
        assert peer.ask("step", **seat(salted))["status"] == "ok"


def test_a_client_sees_what_was_found_and_may_salt(connect: Connect, running: Running) -> None:
    running.engine.cache_prefixes()
    with connect(running.endpoint) as client:
        assert "prefix_cache" in client.info.features
        found = [
            client.open(LONG, salt=salt).cached_tokens for salt in ("", "", "mine", "mine", "")
        ]
        assert found == [0, 384, 0, 384, 384]
        stats = client.stats()
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (5, 3)
