import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine, fake_logits
from gates import Gate, wait_until
from latentd_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    RequestRejected,
    Sampling,
)
from processes import environment
from serving import Running, serving

Connect = Callable[..., Any]


def test_info_tells_the_model_and_the_limits(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        info = client.info
    assert (info.model, info.vocab_size, info.max_ctx) == ("fake", 256, 4096)
    assert (info.buckets, info.eos_token_ids) == ((1, 2, 4, 8), (0,))
    assert (info.version, info.lease_s, info.max_frames) == (1, 60.0, 16)


def test_open_and_steps_follow_the_model(connect: Connect, running: Running) -> None:
    expected = running.engine.expected_token  # type: ignore[attr-defined]
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        tokens = [1, 2, 3]
        assert (slot.context_len, slot.token) == (3, expected(tokens))
        for forced in (None, 17, None):
            tokens.append(slot.token if forced is None else forced)
            step = slot.step(forced)
            assert (step.token, step.context_len) == (expected(tokens), len(tokens))
            assert (slot.token, slot.context_len) == (step.token, step.context_len)


def test_a_numpy_prompt_travels_raw_and_gives_the_same(connect: Connect, running: Running) -> None:
    prompt = np.arange(200, dtype=np.int64)
    with connect(running.endpoint) as client:
        raw, listed = client.open(prompt), client.open(list(prompt))
    assert (raw.token, raw.context_len) == (listed.token, 200)


def test_logits_are_float32_of_the_vocabulary(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([4, 5], logits=True)
        np.testing.assert_array_equal(slot.logits, fake_logits([4, 5], 256))
        step = slot.step(9, logits=True)
        assert step.logits.dtype == np.float32
        np.testing.assert_array_equal(step.logits, fake_logits([4, 5, 9], 256))
        assert slot.step().logits is None


def test_an_empty_prompt_has_no_token_until_a_step_names_one(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([])
        assert (slot.context_len, slot.token) == (0, None)
        with pytest.raises(RequestRejected) as refused:
            slot.step()
        assert refused.value.code == "invalid"
        assert slot.step(5).context_len == 1


def test_several_slots_step_in_one_launch(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slots = [client.open([i]) for i in range(4)]
        before = running.engine.fake.launches  # type: ignore[attr-defined]
        steps = client.step([(slots[0], None), (slots[1], 7), (slots[2], None)], logits=True)
        assert running.engine.fake.launches == before + 1  # type: ignore[attr-defined]
        assert [step.context_len for step in steps] == [2, 2, 2]
        np.testing.assert_array_equal(steps[1].logits, fake_logits([1, 7], 256))
        assert slots[1].token == steps[1].token


def test_a_refused_row_leaves_the_others_alone(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        good, closed = client.open([1]), client.open([2])
        closed.close()
        with pytest.raises(RequestRejected, match="row 1 of 2") as refused:
            client.step([(good, None), (closed, None)])
        rows = refused.value.detail["rows"]
        assert refused.value.code == "epoch_gone"
        assert rows[0].context_len == good.context_len == 2  # type: ignore[index]


def test_a_stream_gives_the_tokens_of_single_steps(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slot, other = client.open([1, 2]), client.open([1, 2])
        singles = [other.step() for _ in range(200)]
        streamed = list(slot.stream(200, credit=16))
        assert [step.token for step in streamed] == [step.token for step in singles]
        assert [step.context_len for step in streamed] == list(range(3, 203))
        assert slot.step().token == other.step().token


def test_a_stream_ends_with_its_stop_token(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        probe = client.open([1, 2])
        tokens = [step.token for step in probe.stream(20)]
        slot = client.open([1, 2])
        streamed = [step.token for step in slot.stream(20, stop=[tokens[9]])]
        assert streamed == tokens[: tokens.index(tokens[9]) + 1]
        assert slot.context_len == 2 + len(streamed)


def test_a_stream_left_early_leaves_the_slot_at_the_last_step_read(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot, other = client.open([1, 2]), client.open([1, 2])
        singles = [other.step() for _ in range(30)]
        for count, step in enumerate(slot.stream(500), 1):  # noqa: B007
            if count == 5:
                break
        assert (slot.context_len, slot.token) == (7, singles[4].token)
        assert slot.step() == singles[5]
        for step in slot.stream(500):
            if step.context_len == 10:
                break
        assert [step.token for step in slot.stream(10)] == [s.token for s in singles[8:18]]


def test_a_stream_that_fills_the_context_says_so_after_its_last_step(
    connect: Connect, endpoint: str
) -> None:
    with serving(endpoint, FakeEngine(max_ctx=100)), connect(endpoint) as client:
        slot = client.open(list(range(90)))
        steps = []
        with pytest.raises(RequestRejected) as refused:  # noqa: PT012
            for step in slot.stream(50):
                steps.append(step)
        assert refused.value.code == "context_full"
        assert [step.context_len for step in steps] == list(range(91, 101))


def test_a_stream_after_a_stream_left_early_counts_its_steps(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        for max_steps in (1, 2, 5):
            slot = client.open([1, 2])
            next(slot.stream(500))
            steps = list(slot.stream(max_steps))
            assert [step.context_len for step in steps] == list(range(4, 4 + max_steps))


def test_truncate_takes_tokens_back(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        first = slot.step(8)
        for _ in range(70):
            slot.step()
        assert slot.truncate(3) == slot.context_len == 3
        assert slot.token is None
        assert slot.step(8) == first


def test_sampling_has_a_seed_and_repeats_with_it(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        drawn = client.open([1], sampling=Sampling(temperature=0.7, top_p=0.9))
        again = client.open([1], sampling=Sampling(temperature=0.7, top_p=0.9, seed=drawn.seed))
        assert again.token == drawn.token
        with pytest.raises(RequestRejected, match="top_p"):
            client.open([1], sampling=Sampling(temperature=1.0, top_p=1.5))


def test_a_closed_slot_is_free_again(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slots = [client.open([i]) for i in range(8)]
        with pytest.raises(RequestRejected) as refused:
            client.open([9])
        assert refused.value.code == "no_slot"
        slots[3].close()
        slots[3].close()
        client.open([9])
        with pytest.raises(RequestRejected) as refused:
            slots[3].step()
        assert refused.value.code == "epoch_gone"


def test_a_closed_client_leaves_nothing_behind(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        client.open([1])
        client.open([2])
    with connect(running.endpoint) as client:
        stats = client.stats()
    assert (stats["slots_used"], stats["server"]["sessions"]) == (0, 1)
    with pytest.raises(ConnectionLost, match="closed"):
        client.ping()


def test_health_and_stats_come_from_the_control_socket(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        client.open([1])
        assert client.health()["state"] == "ready"
        assert client.stats()["kv_pages_used"] == 1
        assert client.ping() > 0


def test_the_context_limit_is_the_same_error_every_time(connect: Connect, endpoint: str) -> None:
    with serving(endpoint, FakeEngine(max_ctx=100)), connect(endpoint) as client:
        with pytest.raises(RequestRejected):
            client.open(list(range(100)))
        slot = client.open(list(range(99)))
        slot.step()
        texts = set()
        for _ in range(10):
            with pytest.raises(RequestRejected) as refused:
                slot.step()
            texts.add((refused.value.code, str(refused.value)))
        assert [code for code, _ in texts] == ["context_full"]


def test_a_step_that_timed_out_is_repeated_safely(connect: Connect, endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), connect(endpoint) as client:
        slot = client.open([1, 2, 3])
        gate.shut()
        with pytest.raises(DeadlineExceeded, match="repeat"):
            slot.step(7, timeout_s=0.2)
        gate.open()
        step = slot.step(7)
        assert (step.context_len, step.replayed) == (4, True)
        assert slot.step().context_len == 5


def test_a_stream_that_timed_out_leaves_a_usable_slot(connect: Connect, endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), connect(endpoint) as client:
        slot, other = client.open([1, 2]), client.open([1, 2])
        singles = [other.step() for _ in range(9)]
        gate.shut()
        with pytest.raises(DeadlineExceeded):
            list(slot.stream(50, timeout_s=0.2))
        gate.open()
        assert slot.step() == singles[0]
        stream = slot.stream(400, credit=2, timeout_s=2.0)
        assert next(stream) == singles[1]
        gate.shut()
        with pytest.raises(DeadlineExceeded):
            list(stream)
        gate.open()
        left = slot.context_len
        assert slot.step().context_len == left + 1
        again = list(slot.stream(3))
        assert [step.context_len for step in again] == [left + 2, left + 3, left + 4]


def test_a_broken_connection_is_resumed_with_the_same_slots(
    connect: Connect, endpoint: str
) -> None:
    with serving(endpoint, max_frame_bytes=4096), connect(endpoint) as client:
        slot, other, streaming = client.open([1]), client.open([1]), client.open([1])
        singles = [other.step() for _ in range(5)]
        stream = streaming.stream(500)
        assert next(stream) == singles[0]
        exchange = client._session.link.exchange
        exchange.max_frame_bytes = 1 << 20
        with pytest.raises(ConnectionLost, match="broke"):
            client.open(np.zeros(2000, np.int32), timeout_s=20)
        assert slot.step(timeout_s=20) == singles[0]
        assert streaming.step(timeout_s=20).token == singles[1].token
        assert streaming.context_len == 3


def test_an_open_that_timed_out_gives_its_slot_back(connect: Connect, endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), connect(endpoint) as client:
        gate.shut()
        with pytest.raises((DeadlineExceeded, RequestRejected)) as error:
            client.open([1, 2, 3], timeout_s=0.2)
        assert error.value.code == "deadline"
        gate.open()
        wait_until(lambda: (client.ping(), client.stats()["slots_used"])[1] == 0)


def test_a_missing_daemon_is_named_at_once(connect: Connect, endpoint: str) -> None:
    with pytest.raises(ConnectionLost, match=r"no daemon listens at .*d\.sock"):
        connect(endpoint)


def test_a_silent_listener_is_a_lost_connection(connect: Connect, endpoint: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(endpoint.removeprefix("ipc://"))
        listener.listen()
        with pytest.raises(ConnectionLost, match="did not say hello"):
            connect(endpoint, connect_timeout_s=0.3)


def test_the_environment_names_the_endpoint(
    connect: Connect, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTD_ENDPOINT", running.endpoint)
    with connect(None) as client:
        assert client.endpoint == running.endpoint


def test_a_restarted_daemon_is_a_lost_connection(connect: Connect, endpoint: str) -> None:
    with serving(endpoint):
        client = connect(endpoint)
        slot = client.open([1])
    with pytest.raises(ConnectionLost):
        slot.step(timeout_s=2)
    with serving(endpoint):
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="restarted"):
                slot.step(timeout_s=5)
        client.close()


def test_a_daemon_that_dies_during_a_call_is_noticed(connect: Connect, endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine) as running:
        client = connect(endpoint)
        slot = client.open([1])
        gate.shut()

        def die() -> None:
            running.server.abort()
            gate.open()

        threading.Timer(0.2, die).start()
        with pytest.raises((ConnectionLost, RequestRejected)):
            [slot.step(timeout_s=20) for _ in range(1000)]
        client.close()


@pytest.mark.parametrize("number", [1.5, True, "1", None], ids=str)
def test_a_number_that_is_no_int_is_refused_not_rounded(
    connect: Connect, running: Running, number: Any
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([np.int64(1), 2])
        calls: list[Callable[[], object]] = [
            lambda: client.open([1, number]),
            lambda: slot.truncate(number),
            lambda: list(slot.stream(3, stop=[number])),
        ]
        if number is not None:
            calls += [lambda: slot.step(number), lambda: client.step([(slot, number)])]
        for call in calls:
            with pytest.raises(ProtocolError, match=f"is {number!r}, must be an int"):
                call()
        assert slot.step(np.uint8(7)).context_len == 3


def test_an_open_whose_daemon_was_killed_ends_at_once(connect: Connect, endpoint: str) -> None:
    with killable(endpoint) as process:
        client = connect(endpoint, timeout_s=10)
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(ConnectionLost, match="broke"):
            client.open([1, 2, 3])
        client.close()


@pytest.mark.parametrize("timeout_s", [math.nan, -1, "soon"], ids=str)
def test_a_time_limit_that_is_none_is_refused(
    connect: Connect, running: Running, timeout_s: Any
) -> None:
    with pytest.raises(ProtocolError, match="timeout_s is"):
        connect(running.endpoint, timeout_s=timeout_s)
    with connect(running.endpoint) as client:
        slot = client.open([1])
        for call in (slot.step, client.ping, slot.close):
            with pytest.raises(ProtocolError, match="timeout_s is"):
                call(timeout_s=timeout_s)
        assert slot.step().context_len == 2


def test_a_caller_may_wait_forever(connect: Connect, running: Running) -> None:
    with connect(running.endpoint, timeout_s=math.inf, connect_timeout_s=math.inf) as client:
        slot = client.open([1])
        assert slot.step(timeout_s=math.inf).context_len == 2
        assert len(list(slot.stream(3, timeout_s=math.inf))) == 3
        assert client.ping(timeout_s=1e300) > 0


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1"])
def test_a_port_that_does_not_exist_is_refused(connect: Connect, endpoint: str) -> None:
    with pytest.raises(ConnectionLost, match="port"):
        connect(endpoint)


def test_a_last_reply_is_read_before_the_loss_of_the_connection(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(running.endpoint) as client:
        gate = Gate(running.engine)  # type: ignore[arg-type]
        slot = client.open([1])
        gate.shut()
        losses = iter([0, 1])

        def break_after_the_reply() -> int:
            if lost := next(losses, 1):  # at 0 the request is not yet sent
                gate.open()
                assert wire.poll(10_000)
            return lost

        wire = client._session.link.wire
        monkeypatch.setattr(wire, "losses", break_after_the_reply)
        assert slot.step().context_len == 2
        monkeypatch.undo()


def test_a_last_reply_is_read_before_the_loss_of_an_async_connection(running: Running) -> None:
    async def main() -> None:
        async with AsyncClient(running.endpoint) as client:
            gate = Gate(running.engine)  # type: ignore[arg-type]
            slot = await client.open([1])
            gate.shut()
            task = asyncio.create_task(slot.step())
            await asyncio.sleep(0)
            gate.open()
            link = client._session.link
            assert link is not None
            assert link.socket.poll(10_000)  # the reply has come, and the loop has not looked yet
            link._wake_all()
            assert (await task).context_len == 2

    asyncio.run(main())


def test_a_message_over_the_limit_is_not_sent(connect: Connect, endpoint: str) -> None:
    with serving(endpoint, max_frame_bytes=4096), connect(endpoint) as client:
        with pytest.raises(ProtocolError, match="4096"):
            client.open(np.zeros(2000, np.int32))
        assert client.open([1]).context_len == 1


def test_the_lease_is_renewed_while_the_owner_thinks(connect: Connect, endpoint: str) -> None:
    with serving(endpoint, lease_s=3.0) as running, connect(endpoint):
        (session,) = running.server.sessions
        before = session.expires_at
        wait_until(lambda: session.expires_at > before + 1.5)  # a second with each renewal
        assert not session.is_gone


def test_threads_share_a_client(running: Running) -> None:
    with Client(running.endpoint) as client:
        slots = [client.open([1, 2]) for _ in range(4)]
        threads = [
            threading.Thread(target=lambda s=s: [s.step() for _ in range(50)]) for s in slots
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {(slot.context_len, slot.token) for slot in slots} == {(52, slots[0].token)}


def test_tasks_decode_side_by_side(running: Running) -> None:
    async def decode(client: AsyncClient) -> tuple[int, ...]:
        slot = await client.open([1, 2])
        return tuple([step.token async for step in slot.stream(60)])

    async def main() -> set[tuple[int, ...]]:
        async with AsyncClient(running.endpoint) as client:
            return set(await asyncio.gather(*(decode(client) for _ in range(6))))

    assert len(asyncio.run(main())) == 1


def test_a_cancelled_task_may_repeat_its_step(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1, 2])
            gate.shut()
            task = asyncio.create_task(slot.step())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert (await slot.step()).context_len == 3
            assert (await slot.step()).context_len == 4

    with serving(endpoint, engine):
        asyncio.run(main())


def test_a_cancelled_open_leaves_no_slot(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)

    async def main() -> None:
        async with AsyncClient(endpoint) as client:
            gate.shut()
            task = asyncio.create_task(client.open([1, 2]))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            for _ in range(100):
                await client.ping()
                if (await client.stats())["slots_used"] == 0:
                    return
            raise AssertionError("the slot was not freed")

    with serving(endpoint, engine):
        asyncio.run(main())


def test_a_killed_client_loses_its_slots_after_lease_and_grace(endpoint: str) -> None:
    script = (
        "import sys, time; from latentd_client import Client\n"
        f"client = Client({endpoint!r}); client.open([1, 2]); print('open', flush=True)\n"
        "time.sleep(60)"
    )
    with serving(endpoint, lease_s=2.0, grace_s=0.5), Client(endpoint) as client:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        assert client.stats()["slots_used"] == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        wait_until(lambda: client.stats()["slots_used"] == 0)


def test_a_process_that_forgets_to_close_ends_all_the_same(running: Running) -> None:
    script = (
        "from latentd_client import Client\n"
        f"client = Client({running.endpoint!r}); slot = client.open([1]); slot.step()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_client_imports_no_torch() -> None:
    script = (
        "import sys, latentd_client; print({'torch', 'cuda', 'safetensors'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert output.stdout == b"set()\n"


@contextlib.contextmanager
def killable(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon in a process of its own, whose engine never finishes."""
    script = (
        "import time; from serving import serving; from fakes import FakeEngine\n"
        "engine = FakeEngine(); engine.fake.wait = lambda: time.sleep(60)\n"
        f"with serving({endpoint!r}, engine): print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()
