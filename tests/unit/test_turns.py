import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

import pytest

from latentd_client import Client, ConnectionLost, DeadlineExceeded, Slot
from latentd_client._turns import Turns
from serving import serving


def test_a_turn_is_waited_for_and_given_back() -> None:
    turns, order = Turns(), list[int]()
    thread = threading.Thread(target=lambda: turns.run(10.0, lambda: order.append(2)))

    def first() -> None:
        thread.start()
        time.sleep(0.05)
        turns.run_if_free(lambda: order.append(0))
        order.append(1)

    turns.run(1.0, first)
    thread.join()
    assert order == [1, 2]
    turns.run_if_free(lambda: order.append(3))
    assert order == [1, 2, 3]


def test_a_turn_that_does_not_come_in_time_is_refused() -> None:
    turns = Turns()

    def second() -> None:
        with pytest.raises(DeadlineExceeded, match="another thread's call"):
            turns.run(0.05, lambda: None)

    turns.run(1.0, second)
    turns.run(1.0, lambda: None)


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where interrupts were raised that Python ignored: in finalizers, and callbacks of weak
    references and of the garbage collector, whoever's they are. Nobody can see those."""
    places: list[str] = []
    before = sys.unraisablehook

    def note(event: Any) -> None:
        if event.exc_type is not KeyboardInterrupt:
            before(event)
            return
        frames = traceback.extract_tb(event.exc_traceback)
        places.append(" < ".join(frame.filename for frame in frames))

    monkeypatch.setattr(sys, "unraisablehook", note)
    return places


def step_until_interrupted(slot: Slot, draw: random.Random, ignored: list[str]) -> None:
    """Step without an end; one more interrupt comes for each that was ignored."""
    while True:
        known = len(ignored)
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 2e-3))
        end = time.monotonic() + 10.0
        while len(ignored) == known:
            assert time.monotonic() < end, "an interrupt was swallowed"
            slot.step(token=7)
            if slot.context_len > 3000:
                slot.truncate(3)


def test_an_interrupt_never_leaves_a_client_unusable(endpoint: str, ignored: list[str]) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    draw = random.Random(1)
    try:
        with serving(endpoint), Client(endpoint, timeout_s=5.0) as client:
            slot = client.open([1, 2, 3])
            for _ in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    step_until_interrupted(slot, draw, ignored)
                assert not client._session.turns._lock.locked()
                client.ping()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not [place for place in ignored if "latentd_client" in place]


def test_an_interrupted_close_closes_all_the_same(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(script: object, deadline: float) -> None:
        raise KeyboardInterrupt

    with serving(endpoint):
        client = Client(endpoint)
        client.health()
        monkeypatch.setattr(client._session, "_drive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
        assert "latentd-watch" not in [thread.name for thread in threading.enumerate()]
        assert client._session.link.wire.is_lost


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_use_or_end_its_parents_session(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint) as client:
        slot = client.open([1, 2, 3])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                slot.step()
            except ConnectionLost:
                client.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert slot.step().context_len == 4
