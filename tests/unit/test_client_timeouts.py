"""Every call of both clients keeps to its time, whoever does not answer."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine
from gates import Gate, wait_until
from latentd_client import Control, DeadlineExceeded, LatentdError, RequestRejected
from serving import halted, serving

LIMIT_S = 0.2
MOST_S = 5.0
"""What a busy machine may add."""

Call = Callable[[Any, Any, Any, float], object]
CALLS: dict[str, Call] = {
    "open": lambda client, slot, pages, limit_s: client.open([1], timeout_s=limit_s).close(),
    "step": lambda client, slot, pages, limit_s: slot.step(timeout_s=limit_s),
    "rows": lambda client, slot, pages, limit_s: client.step([(slot, None)], timeout_s=limit_s),
    "stream": lambda client, slot, pages, limit_s: list(slot.stream(5, timeout_s=limit_s)),
    "draft": lambda client, slot, pages, limit_s: list(
        slot.stream(5, draft="ngram", timeout_s=limit_s)
    ),
    "resume": lambda client, slot, pages, limit_s: list(slot.resume_stream(timeout_s=limit_s)),
    "verify": lambda client, slot, pages, limit_s: slot.verify([1], timeout_s=limit_s),
    "truncate": lambda client, slot, pages, limit_s: slot.truncate(1, timeout_s=limit_s),
    "fork": lambda client, slot, pages, limit_s: slot.fork(timeout_s=limit_s).close(),
    "export": lambda client, slot, pages, limit_s: slot.export(timeout_s=limit_s),
    "adopt": lambda client, slot, pages, limit_s: client.adopt(pages, timeout_s=limit_s).close(),
    "attend": lambda client, slot, pages, limit_s: client.attend(
        0, [(getattr(slot, "_target", slot), 3)], np.zeros((1, 4, 192), np.uint16),
        np.zeros((1, 576), np.uint16), timeout_s=limit_s,
    ),
    "ping": lambda client, slot, pages, limit_s: client.ping(timeout_s=limit_s),
    "close": lambda client, slot, pages, limit_s: slot.close(timeout_s=limit_s),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["plain", "reopen"])
def stuck(
    request: pytest.FixtureRequest, endpoint: str, connect: Callable[..., Any]
) -> Iterator[tuple[Any, FakeEngine, Gate]]:
    """Each client in turn, of a daemon whose engine comes to a halt when the gate is shut."""
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), connect(endpoint, reopen=request.param) as client:
        yield client, engine, gate


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_ends_in_time_though_the_daemon_does_not_answer(
    stuck: tuple[Any, FakeEngine, Gate], name: str
) -> None:
    client, _, gate = stuck
    slot, moved = client.open([1, 2, 3]), client.open([1, 2, 3])
    pages = moved.export()
    with halted(client.endpoint, gate):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            CALLS[name](client, slot, pages, LIMIT_S)
        assert time.monotonic() - start < LIMIT_S + MOST_S
    with contextlib.suppress(RequestRejected):  # there is no stream to resume, and no attention
        CALLS[name](client, slot, pages, 10.0)
    for one in (slot, moved):
        one.close()
    wait_until(lambda: (client.ping(), client.stats()["slots_used"])[1] == 0)


def test_a_call_that_ends_a_stream_first_keeps_to_its_time_as_a_whole(
    stuck: tuple[Any, FakeEngine, Gate],
) -> None:
    client, _, gate = stuck
    slot = client.open([1, 2, 3])
    stream = slot.stream(100, credit=2)
    next(stream)
    with halted(client.endpoint, gate):
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                slot.step(timeout_s=LIMIT_S)
        assert time.monotonic() - start < 3 * LIMIT_S + MOST_S
    assert slot.step().context_len == 5


def test_a_client_closes_in_time_though_the_daemon_does_not_answer(
    stuck: tuple[Any, FakeEngine, Gate], connect: Callable[..., Any]
) -> None:
    client, _, gate = stuck
    slot = client.open([1])
    with halted(client.endpoint, gate):
        with pytest.raises(DeadlineExceeded):
            slot.step(timeout_s=0.1)
        start = time.monotonic()
        client.close()
        assert time.monotonic() - start < 1.0 + MOST_S


def test_a_control_socket_that_does_not_answer_is_not_waited_for(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(endpoint.removeprefix("ipc://"))
        listener.listen()
        start = time.monotonic()
        with pytest.raises(LatentdError):
            Control(endpoint, timeout_s=LIMIT_S)
        assert time.monotonic() - start < LIMIT_S + MOST_S


def test_a_refused_call_does_not_wait(stuck: tuple[Any, FakeEngine, Gate]) -> None:
    client, _, _ = stuck
    start = time.monotonic()
    with pytest.raises(RequestRejected):
        client.open([999])
    assert time.monotonic() - start < MOST_S
