import os
import time

import pytest

from fakes import FakeEngine
from gates import Gate
from latentd_client import Client, DeadlineExceeded, Slot, _link
from serving import serving


def decode(client: Client) -> list[int | None]:
    """Tokens of an open, a step and a stream."""
    slot: Slot = client.open([1, 2, 3])
    return [slot.token, slot.step().token, *(step.token for step in slot.stream(5))]


@pytest.mark.parametrize("spin_s", [0.0005, 10.0])
def test_polling_and_sleeping_clients_decode_the_same(endpoint: str, spin_s: float) -> None:
    with serving(endpoint):
        with Client(endpoint, spin_s=0.0) as client:
            expected = decode(client)
        with Client(endpoint, spin_s=spin_s) as client:
            assert decode(client) == expected


def test_a_thread_sleeps_while_another_of_its_process_polls(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint, spin_s=10.0) as client:
        _link._Spinner.thread = -1  # another thread polls
        assert client.open([1, 2, 3]).step().context_len == 4
        assert _link._Spinner.thread == -1
        _link._Spinner.reset()
        assert client.open([1, 2, 3]).step().context_len == 4
        assert _link._Spinner.thread is None


def test_polling_keeps_to_the_time_of_the_call(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), Client(endpoint, spin_s=10.0) as client:
        slot = client.open([1, 2, 3])
        gate.shut()
        with pytest.raises(DeadlineExceeded, match="repeat"):
            slot.step(timeout_s=0.2)
        assert _link._Spinner.thread is None
        gate.open()
        assert slot.step().context_len == 4


def test_a_client_sleeps_through_a_long_step_and_polls_at_its_end(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step_s, polls = FakeEngine(), 0.05, list[float]()
    wait = engine.fake.wait
    sched_yield = os.sched_yield

    def slow_wait() -> object:
        time.sleep(step_s)
        return wait()

    def polled() -> None:
        polls.append(time.monotonic())
        sched_yield()

    with serving(endpoint, engine), Client(endpoint, spin_s=0.005) as client:
        slot = client.open([1, 2, 3])
        monkeypatch.setattr(engine.fake, "wait", slow_wait)
        slot.step()  # tells how long such a call takes
        monkeypatch.setattr("latentd_client._link.os.sched_yield", polled)
        for _ in range(20):  # a busy machine wakes one who sleeps too late to poll
            polls.clear()
            start = time.monotonic()
            slot.step()
            end = time.monotonic()
            own = [at for at in polls if at < end]  # the server's thread has the same clock
            if own and own[0] > start + step_s / 2 and own[-1] > end - step_s / 2:
                return
    raise AssertionError(f"it polled {[at - start for at in own]} s after the start")
