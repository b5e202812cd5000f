"""Both clients with `reopen`, over daemons that are restarted without their state."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import FAKE_INFO, FakeEngine
from gates import Gate, wait_until
from latentd_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    ModelChanged,
    RequestRejected,
    Sampling,
    SessionLost,
)
from lives import Lives, continued
from serving import lapse, tcp_endpoint

Connect = Callable[..., Any]
PROMPT = [1, 2, 3]
HOT = Sampling(temperature=1.0, seed=9)


@pytest.fixture
def lives(endpoint: str) -> Iterator[Lives]:
    with Lives(endpoint) as lives:
        yield lives


@pytest.fixture
def client(endpoint: str, lives: Lives, connect: Connect) -> Iterator[Any]:
    """Each client in turn, with `reopen`."""
    with connect(endpoint, reopen=True, timeout_s=20.0) as client:
        yield client


def test_a_slot_goes_on_in_the_next_life_as_if_nothing_had_happened(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    tokens = [slot.token, slot.step().token, slot.step(17).token]
    lives.restart()
    tokens += [slot.step().token for _ in range(3)]
    lives.restart()
    tokens += [slot.step().token for _ in range(2)]
    text = [*PROMPT, tokens[0], 17]
    assert tokens == [*continued(PROMPT, 2), *continued(text, 6)]
    assert slot.context_len == len(text) + 5
    assert lives.engine.fake.launches == 1 + 2  # its tokens, and no step twice


def test_only_slots_that_are_used_are_opened_again(client: Any, lives: Lives) -> None:
    slots = [client.open([n]) for n in range(4)]
    lives.restart()
    slots[2].step()
    assert client.stats()["slots_used"] == 1
    slots[0].close()
    assert client.stats()["slots_used"] == 1


def test_a_slot_that_was_closed_is_not_opened_again(client: Any, lives: Lives) -> None:
    slot = client.open(PROMPT)
    slot.close()
    lives.restart()
    with pytest.raises(RequestRejected, match="closed") as refused:
        slot.step()
    assert refused.value.code == "epoch_gone"


def test_sampling_and_a_drawn_seed_go_on(client: Any, lives: Lives) -> None:
    drawn = client.open(PROMPT, sampling=Sampling(temperature=1.0))
    changed = client.open(PROMPT)
    first = changed.step(sampling=HOT).token
    kept = client.open(PROMPT, sampling=HOT)
    other = kept.step(sampling=Sampling(temperature=0.5)).token  # with the seed it has
    lives.restart()
    tokens = [drawn.token, *(drawn.step().token for _ in range(3))]
    assert tokens == continued(PROMPT, 4, drawn.seed)
    text = [*PROMPT, *continued(PROMPT, 1)]
    assert [first, *(changed.step().token for _ in range(3))] == continued(text, 4, HOT.seed or 0)
    expected = continued(PROMPT, 4, HOT.seed or 0)[1:]
    assert [other, *(kept.step().token for _ in range(2))] == expected


def test_a_numpy_prompt_that_its_caller_has_changed_since_is_opened_as_it_was(
    client: Any, lives: Lives
) -> None:
    prompt = np.array(PROMPT)
    slot = client.open(prompt)
    prompt[:] = 99
    lives.restart()
    assert slot.step().token == continued(PROMPT, 2)[1]


def test_a_truncated_slot_must_name_its_token_in_the_next_life_too(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    slot.step()
    slot.truncate(2)
    lives.restart()
    with pytest.raises(RequestRejected) as refused:
        slot.step()
    assert refused.value.code == "invalid"
    assert slot.step(3).token == continued(PROMPT, 1)[0]


def test_an_empty_slot_is_opened_again(client: Any, lives: Lives) -> None:
    slot = client.open([])
    lives.restart()
    assert slot.step(7).token == continued([7], 1)[0]


def test_forks_and_their_source_go_on_apart(client: Any, lives: Lives) -> None:
    source = client.open(PROMPT)
    fork = source.fork(sampling=HOT)
    source.step()
    lives.restart()
    later = source.fork()
    seed = HOT.seed or 0
    text = [*PROMPT, *continued(PROMPT, 1)]
    assert [fork.step().token for _ in range(3)] == continued(text, 3, seed)
    assert [source.step().token for _ in range(3)] == continued(PROMPT, 5)[2:]
    lives.restart()
    assert [later.step().token for _ in range(3)] == continued(PROMPT, 5)[2:]


def test_rows_of_lost_slots_run_once_in_the_next_life(client: Any, lives: Lives) -> None:
    slots = [client.open([n]) for n in range(3)]
    lives.restart()
    steps = client.step([(slot, None) for slot in slots])
    assert [step.token for step in steps] == [continued([n], 2)[1] for n in range(3)]
    assert [step.context_len for step in steps] == [2, 2, 2]


def test_an_adopted_slot_goes_on_in_the_next_life(client: Any, lives: Lives) -> None:
    source = client.open(PROMPT, sampling=HOT)
    pages = replace(source.export(), pieces=())  # the tokens are all that the client keeps
    assert pages.context_len == 3
    adopted = client.adopt(replace(pages, tokens=np.zeros(0, np.int32), token=None))
    lives.restart()
    assert adopted.step(5).token == continued([5], 1, HOT.seed or 0)[0]


def test_an_export_goes_on_in_the_next_life(client: Any, lives: Lives) -> None:
    slot = client.open(list(range(100)))
    lives.restart()
    pages = slot.export()
    assert pages.tokens.tolist() == list(range(100))


def test_a_stream_goes_on_behind_its_last_step(client: Any, lives: Lives) -> None:
    slot = client.open(PROMPT)
    tokens = []
    for step in slot.stream(40, credit=4):
        tokens.append(step.token)
        if len(tokens) in (10, 25):
            lives.restart()
    assert tokens == continued(PROMPT, 41)[1:]
    assert slot.step().token == continued(PROMPT, 42)[41]


def test_a_stream_whose_daemon_went_before_it_began_begins_in_the_next_life(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    lives.restart()
    assert [step.token for step in slot.stream(5)] == continued(PROMPT, 6)[1:]


def test_a_stream_that_has_given_all_ends_though_its_daemon_is_gone(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    stream = slot.stream(5, credit=1)
    tokens = [next(stream).token for _ in range(5)]
    lives.restart()
    assert list(stream) == []
    assert tokens == continued(PROMPT, 6)[1:]
    assert slot.step().token == continued(PROMPT, 7)[6]


def test_a_stop_sequence_across_two_lives_ends_a_stream(client: Any, lives: Lives) -> None:
    expected = continued(PROMPT, 12)
    slot = client.open(PROMPT)
    tokens = []
    for step in slot.stream(40, stop_sequences=[expected[5:8]], credit=2):
        tokens.append(step.token)
        if len(tokens) == 6:  # the first two of the sequence have come
            lives.restart()
    assert tokens == expected[1:8]
    assert slot.context_len == len(PROMPT) + 7
    assert slot.step().token == expected[8]


def test_a_drafted_stream_goes_on_behind_its_last_step(client: Any, lives: Lives) -> None:
    slot = client.open(PROMPT * 10)
    tokens = []
    for step in slot.stream(40, draft="ngram"):
        tokens.append(step.token)
        if len(tokens) in (10, 25):
            lives.restart()
    assert tokens == continued(PROMPT * 10, 41)[1:]


def test_a_drafted_stream_outlives_a_daemon_that_refuses_its_drafts_before_it_ends(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT * 10)
    restart = threading.Thread(target=lives.restart)  # it says "draining" for a while
    tokens = []
    for step in slot.stream(400, draft="ngram"):
        tokens.append(step.token)
        if len(tokens) == 10:
            restart.start()
    restart.join()
    assert tokens == continued(PROMPT * 10, 401)[1:]


def test_a_stream_that_its_reader_left_is_forgotten_with_its_daemon(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    stream = slot.stream(50, credit=8)
    tokens = [next(stream).token for _ in range(3)]
    lives.restart()
    tokens += [slot.step().token for _ in range(3)]
    assert tokens == continued(PROMPT, 7)[1:]
    assert list(stream) == []


def test_a_resumed_stream_goes_on_in_the_next_life(client: Any, lives: Lives) -> None:
    slot = client.open(PROMPT)
    stream = slot.stream(12, credit=2)
    tokens = [next(stream).token for _ in range(3)]
    resumed = slot.resume_stream(credit=2)
    tokens += [next(resumed).token for _ in range(3)]
    lives.restart()
    tokens += [step.token for step in resumed]
    assert tokens == continued(PROMPT, 13)[1:]


def test_bias_and_mask_of_a_stream_hold_in_the_next_life(client: Any, lives: Lives) -> None:
    mask = np.zeros(256, np.bool_)
    mask[[40, 41, 42]] = True
    plain = [step.token for step in client.open(PROMPT).stream(12, mask=mask, bias={41: 1.0})]
    slot = client.open(PROMPT)
    tokens = []
    for step in slot.stream(12, mask=mask, bias={41: 1.0}, credit=2):
        tokens.append(step.token)
        if len(tokens) == 5:
            lives.restart()
    assert tokens == plain


def test_a_step_in_flight_waits_for_the_next_life_and_runs_once(client: Any, lives: Lives) -> None:
    gate = Gate(lives.engine)
    slot = client.open(PROMPT)
    gate.shut()

    def restart() -> None:
        running = lives.running
        assert running is not None
        running.server.abort()
        gate.open()
        lives.restart_later()

    timer = threading.Timer(0.2, restart)
    timer.start()
    step = slot.step()
    timer.join()
    assert (step.token, step.context_len) == (continued(PROMPT, 2)[1], 4)
    assert lives.engine.fake.launches == 2
    wait_until(lambda: lives.running is not None)


def test_an_open_finds_the_next_daemon(client: Any, lives: Lives) -> None:
    timer = lives.restart_later()
    assert client.open(PROMPT).token == continued(PROMPT, 1)[0]
    timer.join()


def test_a_draining_daemon_is_outlived(client: Any, lives: Lives, endpoint: str) -> None:
    slot = client.open(PROMPT)
    old = lives.running
    assert old is not None
    stream = slot.stream(20, credit=1)
    tokens = [next(stream).token]

    def restart() -> None:
        old.stop(0.2)
        lives.begin()

    thread = threading.Thread(target=restart)
    thread.start()
    tokens += [step.token for step in stream]
    thread.join()
    assert tokens == continued(PROMPT, 21)[1:]


def test_in_a_restored_session_a_stream_and_a_step_go_on_and_nothing_is_opened_again(
    client: Any, lives: Lives, tmp_path: Path
) -> None:
    slot, other = client.open(PROMPT), client.open(PROMPT)
    stream = slot.stream(30, credit=4)
    tokens = [next(stream).token for _ in range(7)]
    told = other.step().token
    lives.drain(tmp_path / "saved")
    lives.begin(restore=tmp_path / "saved")
    opened = lives.engine.stats()["opens"]
    tokens += [step.token for step in stream]
    assert tokens == continued(PROMPT, 31)[1:]
    assert [told, other.step().token] == continued(PROMPT, 3)[1:]
    assert lives.engine.stats()["opens"] == opened
    assert lives.engine.slots.num_used == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_client_on_tcp_outlives_its_daemon(connect: Connect, count: int) -> None:
    endpoint = tcp_endpoint()
    with Lives(endpoint) as lives, connect(endpoint, reopen=True, timeout_s=20.0) as client:
        slot = client.open(PROMPT)
        for _ in range(count):
            lives.restart_later(0.1).join()
            slot.step()
        stream, tokens = slot.stream(20, credit=2), []
        for step in stream:
            tokens.append(step.token)
            if len(tokens) == 5:
                lives.restart_later(0.1).join()
        assert tokens == continued(PROMPT, 21 + count)[1 + count :]


def test_a_call_gives_up_when_its_time_is_over(client: Any, lives: Lives) -> None:
    slot = client.open(PROMPT)
    lives.end()
    start = time.monotonic()
    with pytest.raises(ConnectionLost):
        slot.step(timeout_s=0.5)
    assert 0.3 < time.monotonic() - start < 3.0
    lives.begin()
    assert slot.step().token == continued(PROMPT, 2)[1]


def test_another_model_is_refused_by_name_until_the_right_one_is_back(
    client: Any, lives: Lives
) -> None:
    slot = client.open(PROMPT)
    info = replace(FAKE_INFO, name="other", fingerprint="f" * 64)
    lives.restart(FakeEngine(info))
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(ModelChanged, match=r"'other' .*ffff.* in place of 'fake' .*0000"):
            slot.step()
    assert time.monotonic() - start < 5.0
    assert lives.engine.fake.launches == 0
    lives.restart()
    assert slot.step().token == continued(PROMPT, 2)[1]


def test_a_session_that_ended_for_silence_begins_again(
    connect: Connect, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd_client._watch.Watch._renew", lambda watch: None)
    with (
        Lives(endpoint, lease_s=0.3, grace_s=0.0) as lives,
        connect(endpoint, reopen=True) as client,
    ):
        slot = client.open(PROMPT)
        wait_until(lambda: lives.engine.slots.num_used == 0)
        assert slot.step().token == continued(PROMPT, 2)[1]


def test_a_broken_connection_alone_repeats_the_step_in_the_same_session(
    connect: Connect, endpoint: str
) -> None:
    with (
        Lives(endpoint, max_frame_bytes=4096) as lives,
        connect(endpoint, reopen=True, timeout_s=20.0) as client,
    ):
        slot = client.open(PROMPT)
        session, token = client._session.calls.session, slot.token
        stream = slot.stream(30, credit=2)
        tokens = [next(stream).token for _ in range(4)]
        client._session.link.exchange.max_frame_bytes = 1 << 20
        with pytest.raises((ConnectionLost, DeadlineExceeded)):  # it breaks it again and again
            client.open(np.zeros(2000, np.int32), timeout_s=0.3)
        client._session.link.exchange.max_frame_bytes = 4096
        tokens += [step.token for step in stream]
        assert [token, *tokens] == continued(PROMPT, 31)
        assert client._session.calls.session == session
        assert lives.engine.slots.num_used == 1


@pytest.mark.parametrize("reason", ["restart", "silence"])
def test_without_reopen_the_error_says_what_happened_and_what_to_do(
    connect: Connect, endpoint: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd_client._watch.Watch._renew", lambda watch: None)
    with Lives(endpoint, grace_s=0.0) as lives, connect(endpoint) as client:
        slot = client.open(PROMPT)
        if reason == "restart":
            lives.restart()
            with pytest.raises(ConnectionLost):
                slot.step()
        else:
            assert lives.running is not None
            lapse(lives.running, client._session.calls.session)
        wait_until(lambda: lives.engine.slots.num_used == 0)
        said = "restarted" if reason == "restart" else "did not hear of it"
        for call in (slot.step, client.ping, lambda: client.open(PROMPT)):
            with pytest.raises(SessionLost, match=rf"{said}.*slots are lost: make a new client"):
                call()


def test_tasks_that_wait_for_the_next_life_share_one_session(endpoint: str) -> None:
    async def decode(client: AsyncClient, first: int) -> list[int]:
        slot = await client.open([first])
        return [slot.token or 0] + [step.token async for step in slot.stream(200, credit=2)]

    async def main(lives: Lives) -> list[list[int]]:
        async with AsyncClient(endpoint, reopen=True, timeout_s=20.0) as client:
            tasks = [asyncio.ensure_future(decode(client, n)) for n in range(6)]
            for _ in range(3):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(lives.restart)
            texts = await asyncio.gather(*tasks)
            assert (await client.health())["sessions"] == 1
            return texts

    with Lives(endpoint) as lives:
        texts = asyncio.run(main(lives))
    assert texts == [continued([n], 201) for n in range(6)]


def test_a_task_that_waits_for_the_next_life_can_be_cancelled(endpoint: str) -> None:
    async def main(lives: Lives) -> None:
        async with AsyncClient(endpoint, reopen=True, timeout_s=20.0) as client:
            slot = await client.open(PROMPT)
            await asyncio.to_thread(lives.end)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(slot.step(), 0.3)
            await asyncio.to_thread(lives.begin)
            assert (await slot.step()).token == continued(PROMPT, 2)[1]

    with Lives(endpoint) as lives:
        asyncio.run(main(lives))


def test_threads_that_wait_for_the_next_life_all_go_on(endpoint: str) -> None:
    with Lives(endpoint) as lives, Client(endpoint, reopen=True, timeout_s=20.0) as client:
        texts: dict[int, list[int]] = {}

        def decode(first: int) -> None:
            slot = client.open([first])
            texts[first] = [slot.token or 0, *(slot.step().token for _ in range(100))]

        threads = [threading.Thread(target=decode, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.05)
            lives.restart()
        for thread in threads:
            thread.join(30)
        assert texts == {n: continued([n], 101) for n in range(4)}


def test_rows_of_which_some_were_refused_are_not_run_again(
    client: Any, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    from latentd_client import _request

    one, other = client.open([1]), client.open([2])
    monkeypatch.setattr(
        "latentd_client._stepping.refusal",
        lambda header: _request.refusal({**header, "status": "draining"}),
    )
    with pytest.raises(RequestRejected, match="row 1 of 2"):
        client.step([(one, None), (other, 999)])
    assert (one.context_len, other.context_len) == (2, 1)


def test_a_slot_that_attend_has_filled_says_that_it_cannot_be_opened_again(
    client: Any, lives: Lives
) -> None:
    slot = client.open([])
    getattr(slot, "_target", slot).attended(1)
    lives.restart()
    with pytest.raises(RequestRejected, match="latents of attend") as refused:
        slot.step(1)
    assert refused.value.code == "epoch_gone"
