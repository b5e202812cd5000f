"""Connections that break at a bad moment: no call is lost with them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from fakes import FakeEngine
from latentd_client import AsyncClient, Client, _link
from latentd_client._wire import ZmqWire
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

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


def test_a_call_at_the_moment_of_a_break_goes_out_on_the_next_connection(endpoint: str) -> None:
    async def main(running: Running) -> None:
        async with AsyncClient(endpoint, timeout_s=3) as client:
            link = client._session.link
            assert link is not None
            for _ in range(ROUNDS):
                await client.ping()
                break_it(running, lambda: link.losses)
                assert (await client.open([1])).context_len == 1

    with serving(endpoint, FakeEngine(max_slots=ROUNDS)) as running:
        asyncio.run(main(running))


def test_a_blocking_call_at_that_moment_does_so_too(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link, "open_wire", ZmqWire)
    engine = FakeEngine(max_slots=ROUNDS)
    with serving(endpoint, engine) as running, Client(endpoint, timeout_s=3) as client:
        for _ in range(ROUNDS):
            client.ping()
            break_it(running, client._session.link.wire.losses)
            assert client.open([1]).context_len == 1
