"""Who keeps the control socket from answering does not make others' leases lapse."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fakes import FakeEngine
from gates import slow_down, wait_until
from latentd_client import AsyncClient, Client, ConnectionLost, Control
from serving import Running, serving

LEASE: dict[str, Any] = {"lease_s": 1.0, "grace_s": 0.5}
LONG_S = 3.0
"""Too long for a session that nobody renews."""


@contextlib.contextmanager
def silent_control(running: Running) -> Iterator[None]:
    """The control socket takes connections and says nothing, as when it is held full."""
    path = running.server.control_endpoint.removeprefix("ipc://")
    os.rename(path, path + ".away")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen(64)
        yield
    os.rename(path + ".away", path)


def test_an_idle_client_keeps_its_session_without_the_control_socket(endpoint: str) -> None:
    with serving(endpoint, **LEASE) as running, Client(endpoint) as client:
        slot = client.open([1])
        with silent_control(running):
            time.sleep(LONG_S)
            assert slot.step().context_len == 2
        assert not client._session.turns._lock.locked()


def test_an_idle_client_on_tcp_keeps_its_session_without_the_control_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise ConnectionLost("held full")

    monkeypatch.setattr(Control, "renew", refuse)
    with serving("tcp://127.0.0.1:*", **LEASE) as running, Client(running.endpoint) as client:
        slot = client.open([1])
        time.sleep(LONG_S)
        assert slot.step().context_len == 2


def test_an_idle_event_loop_keeps_its_session_without_the_control_socket(endpoint: str) -> None:
    async def main(running: Running) -> int:
        async with AsyncClient(endpoint) as client:
            slot = await client.open([1])
            with silent_control(running):
                await asyncio.sleep(LONG_S)
                return (await slot.step()).context_len

    with serving(endpoint, **LEASE) as running:
        assert asyncio.run(main(running)) == 2


def test_a_call_that_waits_long_renews_the_lease_meanwhile(endpoint: str) -> None:
    engine = FakeEngine(prefill_chunk=1)
    slow_down(engine, 0.02)
    with serving(endpoint, engine, **LEASE) as running, Client(endpoint) as client:
        slot = client.open([1])
        with silent_control(running):
            start = time.monotonic()
            other = client.open([2] * 150)  # 150 launches of 20 ms
            assert time.monotonic() - start > LONG_S
            assert [slot.step().context_len, other.step().context_len] == [2, 151]


def test_many_renewals_leave_nothing_unread(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint) as client:
        link, turns, session = (
            client._session.link,
            client._session.turns,
            client._session.calls.session,
        )
        for _ in range(100):
            link.renew(session, turns)

        def are_read() -> bool:
            link.renew(session, turns)
            return link.exchange.skipped >= 100

        wait_until(are_read)


def test_the_watch_lives_on_when_there_was_no_descriptor(endpoint: str) -> None:
    with serving(endpoint, **LEASE), Client(endpoint) as client:
        slot = client.open([1])
        with no_descriptors():
            with pytest.raises(ConnectionLost, match="Too many open files"):
                Client(endpoint)
            time.sleep(LEASE["lease_s"] / 2)
        assert client._session._watch is not None
        assert client._session._watch._thread.is_alive()
        time.sleep(LONG_S)
        assert slot.step().context_len == 2


@pytest.mark.parametrize("kind", ["blocking", "blocking on tcp", "asyncio"])
def test_a_client_that_is_forgotten_amid_a_renewal_keeps_nobody_waiting(
    endpoint: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, engine = threading.Event(), threading.Event(), FakeEngine()

    def hang(*args: object) -> None:
        begun.set()
        may_end.wait(60)

    async def connect() -> object:
        client = await AsyncClient(endpoint).connect()
        await client.open([1])
        return client

    before = num_watches()
    monkeypatch.setattr(Control, "renew", hang)
    with serving("tcp://127.0.0.1:*" if kind.endswith("tcp") else endpoint, engine, **LEASE) as it:
        client: object
        if kind == "asyncio":
            client = asyncio.run(connect())
        else:
            client = Client(it.endpoint)
            client.open([1])
        assert begun.wait(60)
        start = time.monotonic()
        del client
        gc.collect()
        assert time.monotonic() - start < 5.0
        may_end.set()
        wait_until(lambda: num_watches() == before)
        wait_until(lambda: engine.slots.num_used == 0)


def num_watches() -> int:
    return [thread.name for thread in threading.enumerate()].count("latentd-watch")


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
