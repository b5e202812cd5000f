"""What may go wrong around an AsyncClient: cancels, lost connections, forks, loops, forgotten
clients and streams."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from fakes import FakeEngine
from gates import PATIENCE_S, Gate, slow_down
from latentd import intake
from latentd_client import AsyncClient, AsyncSlot, Client, ConnectionLost, DeadlineExceeded
from serving import Running, num_unread, serving

ASKS: dict[str, Callable[[Any, Any], Coroutine[Any, Any, Any]]] = {
    "step": lambda client, slot: slot.step(),
    "rows": lambda client, slot: client.step([(slot, None)]),
    "truncate": lambda client, slot: slot.truncate(2),
    "open": lambda client, slot: client.open([5] * 300),
    "ping": lambda client, slot: client.ping(),
}


def num_watches() -> int:
    return sum(thread.name == "latentd-watch" for thread in threading.enumerate())


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def arriving_from(running: Running) -> AsyncIterator[None]:
    """While the daemon waits for a launch: a message that leaves within has arrived at its end."""
    before = num_unread(running)
    yield
    await until(lambda: num_unread(running) > before)


async def expect_working(client: AsyncClient, engine: FakeEngine) -> None:
    """A new slot decodes as it should."""
    slot = await client.open([7, 8])
    first = sampled(slot)
    assert (await slot.step()).token == engine.expected_token([7, 8, first])
    await slot.close()


def sampled(slot: AsyncSlot) -> int:
    """The token that a slot sampled last."""
    assert slot.token is not None
    return slot.token


@pytest.mark.parametrize("ask", list(ASKS))
@pytest.mark.parametrize("turns", range(6))
def test_a_call_cancelled_after_any_number_of_turns_leaves_all_usable(
    endpoint: str, ask: str, turns: int
) -> None:
    engine = FakeEngine()

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2, 3])
            first = sampled(slot)
            task = asyncio.create_task(ASKS[ask](client, slot))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if ask in ("step", "rows"):  # the same call again: nothing is appended twice
                if slot.context_len == 3:
                    await ASKS[ask](client, slot)
                assert slot.context_len == 4
                assert slot.token == engine.expected_token([1, 2, 3, first])
            elif ask == "truncate":
                await slot.truncate(slot.context_len) if slot.context_len == 2 else None
            await expect_working(client, engine)

    with serving(endpoint, engine):
        asyncio.run(main())
    assert engine.slots.num_used == 0


def test_a_cancelled_open_gives_its_slot_back(endpoint: str) -> None:
    """Long before its prompt would be done."""
    engine = FakeEngine(prefill_chunk=1)
    slow_down(engine, 0.001)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            task = asyncio.create_task(client.open([1] * 4000))
            await until(lambda: engine.slots.num_used == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.slots.num_used == 0)
            assert engine.fake.launches < 4000
            await expect_working(client, engine)

    with serving(endpoint, engine):
        asyncio.run(main())


def test_a_time_limit_around_a_step_is_a_cancel_and_the_step_can_be_repeated(
    endpoint: str,
) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2, 3])
            first = sampled(slot)
            gate.shut()
            step = asyncio.create_task(slot.step())
            await asyncio.to_thread(gate.await_launch)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(step, 0.05)
            with pytest.raises(DeadlineExceeded):
                await slot.step(timeout_s=0.05)
            gate.open()
            assert (await slot.step()).replayed
            assert slot.token == engine.expected_token([1, 2, 3, first])
            assert slot.context_len == 4

    with serving(endpoint, engine):
        asyncio.run(main())


@pytest.mark.parametrize("turns", range(8))
def test_a_cancelled_reader_of_a_stream_goes_on_where_it_stood(endpoint: str, turns: int) -> None:
    engine = FakeEngine()

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2, 3])
            tokens = [1, 2, 3, sampled(slot)]

            async def read() -> None:
                async for step in slot.stream(200, credit=4):
                    tokens.append(step.token)

            task = asyncio.create_task(read())
            for _ in range(turns * 3):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            step = await slot.step()
            # a step that was taken over and not handed out may lie between
            assert slot.context_len in (len(tokens), len(tokens) + 1)
            while len(tokens) < slot.context_len:
                tokens.append(engine.expected_token(tokens))
            assert step.token == engine.expected_token(tokens)

    with serving(endpoint, engine):
        asyncio.run(main())


def test_an_abandoned_stream_ends_and_frees_the_slot_for_the_next_call(endpoint: str) -> None:
    engine = FakeEngine()

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2, 3])
            stream = slot.stream(1000)
            await anext(stream)
            del stream  # nobody closes it
            gc.collect()
            await until(lambda: not engine.scheduler.streams)
            assert (await slot.step()).context_len == 5

    with serving(endpoint, engine):
        asyncio.run(main())


def test_a_close_that_is_cancelled_has_closed_all_the_same(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        client = await AsyncClient(endpoint).connect()
        slot = await client.open([1, 2, 3])
        gate.shut()
        step = asyncio.create_task(slot.step())
        await asyncio.to_thread(gate.await_launch)  # nobody answers the close
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ConnectionLost):
            await step
        assert num_watches() == before
        assert client._session.link is not None
        assert client._session.link.socket.closed
        gate.open()

    before = num_watches()
    with serving(endpoint, engine):
        asyncio.run(main())


def test_two_closes_at_a_time_both_end_when_all_is_closed(endpoint: str) -> None:
    async def main() -> None:
        client = await AsyncClient(endpoint).connect()
        await asyncio.gather(client.close(), client.close())
        assert num_watches() == before

    before = num_watches()
    with serving(endpoint) as running:
        asyncio.run(main())
        assert len(running.server._work.sessions) == 0


def test_a_cancelled_connect_leaves_nothing_behind(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncClient(endpoint) as other:
            slot = await other.open([1])
            gate.shut()
            step = asyncio.create_task(slot.step())
            await asyncio.to_thread(gate.await_launch)
            client = AsyncClient(endpoint)
            task = asyncio.create_task(client.connect())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client._session.link is not None
            assert client._session.link.socket.closed
            gate.open()
            await step
            with pytest.raises(ConnectionLost, match="closed"):
                await client.ping()

    with serving(endpoint, engine):
        asyncio.run(main())


def test_the_word_of_a_broken_connection_ends_nothing_that_waits_on_the_next(endpoint: str) -> None:
    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            link = client._session.link
            assert link is not None
            assert link._watch is not None
            link._watch.losses += 1  # a call may see this before the loop is told
            link.loop.call_soon(link._wake_all)
            assert await client.ping() > 0

    with serving(endpoint):
        asyncio.run(main())


def test_a_second_connect_is_refused_and_the_client_goes_on(endpoint: str) -> None:
    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            with pytest.raises(ConnectionLost, match="once"):
                await client.connect()
            assert await client.ping() > 0

    with serving(endpoint):
        asyncio.run(main())


def test_a_client_of_another_event_loop_is_refused_by_name_and_can_be_closed(
    endpoint: str,
) -> None:
    async def make() -> tuple[AsyncClient, Any]:
        client = await AsyncClient(endpoint, reopen=True, timeout_s=30.0).connect()
        return client, await client.open([1, 2, 3])

    async def use(client: AsyncClient, slot: Any) -> None:
        start = time.monotonic()
        for call in (slot.step(), client.ping(), client.open([1])):
            with pytest.raises(ConnectionLost, match="another event loop"):
                await call
        assert time.monotonic() - start < 10.0  # nothing that comes later would help
        await client.close()
        assert num_watches() == before

    before = num_watches()
    with serving(endpoint) as running:
        client, slot = asyncio.run(make())
        asyncio.run(use(client, slot))
        asyncio.run(until(lambda: len(running.server._work.sessions) == 0))


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(endpoint: str) -> None:
    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2, 3])
            child = os.fork()
            if not child:
                os._exit(in_child(client, slot))
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert (await slot.step()).context_len == 4

    def in_child(client: AsyncClient, slot: Any) -> int:
        """0 when every call is refused and close returns."""

        async def use() -> int:
            for call in (slot.step(), client.ping(), client.open([1])):
                try:
                    await asyncio.wait_for(call, 3)
                    return 1
                except ConnectionLost as error:
                    if "fork" not in str(error):
                        return 2
            await asyncio.wait_for(client.close(), 3)
            return 0

        try:
            asyncio.events._set_running_loop(None)
            return asyncio.new_event_loop().run_until_complete(use())
        except BaseException:
            return 3

    with serving(endpoint):
        asyncio.run(main())


def test_an_open_cancelled_while_its_reply_is_read_gives_its_slot_back(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            assert client._session.link is not None
            receive = client._session.link.exchange.receive

            def receive_and_cancel(frames: list[bytes]) -> None:
                receive(frames)
                task.cancel()

            gate.shut()
            task = asyncio.create_task(client.open([1, 2, 3]))
            await asyncio.sleep(0)  # its request is on the way
            client._session.link.exchange.receive = receive_and_cancel  # type: ignore[method-assign]
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.fake.launches == 1
            client._session.link.exchange.receive = receive  # type: ignore[method-assign]
            await until(lambda: engine.slots.num_used == 0)

    with serving(endpoint, engine):
        asyncio.run(main())


def test_an_open_interrupted_while_its_reply_is_read_gives_its_slot_back(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    with serving(endpoint, engine), Client(endpoint) as client:
        receive = client._session.link.exchange.receive

        def receive_and_interrupt(frames: list[bytes]) -> None:
            receive(frames)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client._session.link.exchange, "receive", receive_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.open([1, 2, 3])
        assert engine.slots.num_used == 1
        client.ping()
        asyncio.run(until(lambda: engine.slots.num_used == 0))


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_forgotten_client_is_not_renewed_for_ever(endpoint: str, kind: str) -> None:
    """Nobody can use it any more: its slots go with the lease."""

    async def forget() -> None:
        client = await AsyncClient(endpoint).connect()
        await client.open([1, 2, 3])

    before = num_watches()
    engine = FakeEngine()
    with serving(endpoint, engine, lease_s=0.3, grace_s=0.1):
        if kind == "asyncio":
            asyncio.run(forget())
        else:
            client = Client(endpoint)
            client.open([1, 2, 3])
            del client
        gc.collect()
        asyncio.run(until(lambda: num_watches() == before))
        asyncio.run(until(lambda: engine.slots.num_used == 0))


def test_a_lost_connection_wakes_all_who_wait_and_the_client_recovers(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main(running: Any) -> None:
        async with AsyncClient(endpoint) as client:
            slots = [await client.open([i, 2, 3]) for i in range(3)]
            tokens = [sampled(slot) for slot in slots]
            gate.shut()
            steps = [asyncio.create_task(slot.step()) for slot in slots]
            await asyncio.to_thread(gate.await_launch)
            router = running.server._listener.router
            for peer in list(router._peers.values()):
                peer.socket.shutdown(2)  # as when the connection breaks
            for step in steps:
                with pytest.raises(ConnectionLost, match="broke"):
                    await step
            gate.open()
            for i, slot in enumerate(slots):
                assert (await slot.step()).context_len == 4
                assert slot.token == engine.expected_token([i, 2, 3, tokens[i]])

    with serving(endpoint, engine) as running:
        asyncio.run(main(running))


def test_health_and_stats_at_a_time_share_one_connection(endpoint: str) -> None:
    async def main() -> None:
        client = await AsyncClient(endpoint).connect()
        answers = await asyncio.gather(*(client.health() for _ in range(8)), client.stats())
        assert answers[0]["state"] == "ready"
        await client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await client.health()

    with serving(endpoint):
        asyncio.run(main())


def test_many_clients_in_threads_with_loops_of_their_own(endpoint: str) -> None:
    engine = FakeEngine()
    failures: list[BaseException] = []

    async def decode(number: int) -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([number, 1])
            tokens = [number, 1, sampled(slot)]
            for _ in range(20):
                tokens.append((await slot.step()).token)
            assert tokens[-1] == engine.expected_token(tokens[:-1])

    def run(number: int) -> None:
        try:
            asyncio.run(decode(number))
        except BaseException as error:
            failures.append(error)

    with serving(endpoint, engine):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert not failures


@pytest.mark.parametrize("ask", ["step", "rows", "verify"])
def test_a_cancelled_call_that_waits_at_the_daemon_is_taken_back(
    endpoint: str, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TAKE_S", 600.0)  # all that is there is taken behind a launch
    engine = FakeEngine()
    gate = Gate(engine)
    asks: dict[str, Callable[[AsyncClient, AsyncSlot], Coroutine[Any, Any, Any]]] = {
        "step": lambda client, slot: slot.step(),
        "rows": lambda client, slot: client.step([(slot, None)]),
        "verify": lambda client, slot: slot.verify([1] * 7),
    }

    async def main(running: Running) -> None:
        async with AsyncClient(endpoint) as client:
            slots = [await client.open([n]) for n in range(6)]
            gate.shut()
            before = [asyncio.create_task(slots[0].verify([1] * 7))]
            await asyncio.to_thread(gate.await_launch)
            for slot in slots[1:5]:  # each draft fills a launch
                async with arriving_from(running):
                    before.append(asyncio.create_task(slot.verify([1] * 7)))
            async with arriving_from(running):
                task = asyncio.create_task(asks[ask](client, slots[5]))
            async with arriving_from(running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            gate.open()
            await asyncio.gather(*before)
            assert (await client.stats())["failed"] == {"cancelled": 1}
            step = await slots[5].step()
            assert (step.context_len, step.replayed) == (2, False)

    with serving(endpoint, engine) as running:
        asyncio.run(main(running))
