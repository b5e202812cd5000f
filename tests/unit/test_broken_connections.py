"""Connections that break at a bad moment: no call is lost with them, and no word before it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from fakes import FakeEngine
from gates import Gate, wait_until
from latentd_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    RequestRejected,
    SessionLost,
    _link,
)
from latentd_client._request import Call
from latentd_client._wire import ZmqWire
from lives import Lives, continued
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Running

ROUNDS = 30


def break_it(running: Any, losses: Callable[[], int]) -> None:
    """Return when the client has seen that its connection broke, not a moment later: libzmq takes
    messages for it still."""
    before = losses()
    for peer in list(running.server._listener.router._peers.values()):
        peer.socket.shutdown(2)
    while losses() == before:
        time.sleep(0)


def cut_off(running: Running, client: Any) -> tuple[Any, list[int]]:
    """A slot whose stream has lost its connection, and its tokens from the first behind the prompt
    1, 2, 3 on."""
    slot = client.open([1, 2, 3])
    stream = slot.stream(40, credit=4)
    tokens = [slot.token, next(stream).token]
    wait_until(lambda: client.ping() > 0 and len(slot._reader.pending.replies) == 3)
    break_it(running, client._session.link.losses)
    with pytest.raises(ConnectionLost):
        tokens += (step.token for step in stream)
    return slot, tokens


@contextlib.contextmanager
def losing(client: Any, is_lost: Callable[[Call], bool]) -> Iterator[None]:
    """The connection breaks whenever such a call is on its way."""
    exchange = client._session.link.exchange
    start = exchange.start

    def lose(call: Call) -> Any:
        if is_lost(call):
            raise ConnectionLost("on its way")
        return start(call)

    with mock.patch.object(exchange, "start", lose):
        yield


def test_a_call_at_the_moment_of_a_break_goes_out_on_the_next_connection(endpoint: str) -> None:
    async def main(running: Running) -> None:
        async with AsyncClient(endpoint, timeout_s=20) as client:
            link = client._session.link
            assert link is not None
            for _ in range(ROUNDS):
                await client.ping()
                break_it(running, link.losses)
                assert (await client.open([1])).context_len == 1

    with serving(endpoint, FakeEngine(max_slots=ROUNDS)) as running:
        asyncio.run(main(running))


def test_a_blocking_call_at_that_moment_does_so_too(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "open_wire", ZmqWire)
    engine = FakeEngine(max_slots=ROUNDS)
    with serving(endpoint, engine) as running, Client(endpoint, timeout_s=20) as client:
        for _ in range(ROUNDS):
            client.ping()
            break_it(running, client._session.link.wire.losses)
            assert client.open([1]).context_len == 1


def test_all_tasks_are_told_that_their_session_was_lost_and_none_begins_another(
    endpoint: str,
) -> None:
    async def main(lives: Lives) -> None:
        async with AsyncClient(endpoint) as client:
            slots = [await client.open([n]) for n in range(3)]
            await asyncio.to_thread(lives.restart)
            assert client._session.link is not None
            while not client._session.link.losses():
                await asyncio.sleep(0.01)
            steps = [slot.step() for slot in slots]
            told = await asyncio.gather(*steps, return_exceptions=True)
            assert [type(error) for error in told] == [SessionLost] * 3

    with Lives(endpoint) as lives:
        asyncio.run(main(lives))
        assert lives.engine.stats()["opens"] == 0


def test_a_task_keeps_to_its_time_while_another_one_mends_the_connection(endpoint: str) -> None:
    async def main(running: Running, gate: Gate) -> None:
        async with AsyncClient(endpoint) as client:
            slots = [await client.open([n]) for n in range(2)]
            gate.shut()
            held = asyncio.create_task(slots[0].step())
            await asyncio.to_thread(gate.await_launch)
            assert client._session.link is not None
            await asyncio.to_thread(break_it, running, client._session.link.losses)
            patient = asyncio.create_task(slots[1].step())
            await asyncio.sleep(0)
            start = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="not made again yet"):
                await client.ping(timeout_s=0.2)
            assert time.monotonic() - start < 3.0  # the other one waits for 5
            gate.open()
            assert (await patient).context_len == 2
            await asyncio.gather(held, return_exceptions=True)

    engine = FakeEngine()
    with serving(endpoint, engine) as running:
        asyncio.run(main(running, Gate(engine)))


def test_a_stream_is_read_to_its_end_when_its_daemon_has_left_behind_it(endpoint: str) -> None:
    with serving(endpoint) as running, Client(endpoint) as client:
        steps = client.open([1, 2, 3]).stream(max_steps=60)
        next(steps)
        running.stop(20)
        assert len(list(steps)) == 59  # halfway it grants credit, which nobody takes


def test_an_asyncio_stream_is_read_to_its_end_too(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 1.0)  # a busy machine looks late

    async def main(running: Running) -> None:
        async with AsyncClient(endpoint) as client:
            link, slot = client._session.link, await client.open([1, 2, 3])
            assert link is not None
            steps = slot.stream(max_steps=60)
            await anext(steps)
            await asyncio.to_thread(running.stop, 20)
            while not link.losses():
                await asyncio.sleep(0.01)
            assert len([step async for step in steps]) == 59

    with serving(endpoint) as running:
        asyncio.run(main(running))


def test_a_stream_whose_connection_broke_between_two_steps_goes_on_with_its_next_reader(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint) as running, connect(endpoint) as client:
        slot, tokens = cut_off(running, client)
        tokens += (step.token for step in slot.resume_stream())
        assert tokens == continued([1, 2, 3], 41)


def test_a_stream_that_was_lost_before_it_began_is_not_taken_for_the_one_before_it(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint), connect(endpoint) as client:
        slot = client.open([1, 2, 3])
        tokens = [slot.token, *(step.token for step in slot.stream(5))]
        with losing(client, lambda call: call.op == "stream"), pytest.raises(ConnectionLost):
            next(slot.stream(5))
        tokens += (step.token for step in slot.resume_stream())
        assert tokens == continued([1, 2, 3], 11)


def test_a_stream_whose_next_reader_was_lost_too_ends_with_the_next_call_on_its_slot(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint) as running, connect(endpoint, timeout_s=5.0) as client:
        slot, tokens = cut_off(running, client)
        with losing(client, lambda call: call.op == "resume" and "slot" in call.fields):
            for _ in range(2):
                with pytest.raises(ConnectionLost):
                    next(slot.resume_stream())
        assert [*tokens, slot.step().token] == continued([1, 2, 3], len(tokens) + 1)


def test_a_stream_that_was_lost_while_the_one_before_it_was_ended_is_the_one_that_is_resumed(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint), connect(endpoint) as client:
        slot = client.open([1, 2, 3])
        left = slot.stream(40, credit=2)
        tokens = [slot.token, next(left).token]
        with losing(client, lambda call: call.op == "cancel"), pytest.raises(ConnectionLost):
            next(slot.stream(5))
        tokens += (step.token for step in slot.resume_stream())
        assert tokens == continued([1, 2, 3], 7)
        left.close()


def test_who_has_read_a_stream_before_does_not_end_it_for_its_reader(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint), connect(endpoint) as client:
        slot = client.open([1, 2, 3])
        before = slot.stream(40, credit=2)
        tokens = [slot.token, next(before).token]
        stream = slot.resume_stream(credit=2)
        tokens.append(next(stream).token)
        before.close()
        del before
        tokens += (step.token for step in stream)
        assert tokens == continued([1, 2, 3], 41)


def test_who_reads_a_stream_late_is_told_why_its_daemon_has_failed(endpoint: str) -> None:
    engine = FakeEngine()
    with serving(endpoint, engine) as running, Client(endpoint) as client:
        slot = client.open([1, 2, 3])
        steps = slot.stream(max_steps=5000, credit=4)
        tokens = [next(steps)]
        wait_until(lambda: engine.fake.launches == 5)  # the prompt, and what there is credit for
        engine.fake.fault = "CUDA_ERROR_ILLEGAL_ADDRESS"
        tokens += [next(steps), next(steps)]  # half of the window: the daemon goes on, and fails
        running.thread.join(60)
        with pytest.raises(RequestRejected, match="ILLEGAL_ADDRESS"):
            tokens += steps
        assert 4 <= len(tokens) == slot.context_len - 3
