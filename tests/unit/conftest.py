"""Fixtures for unit tests: a server over the fake engine, both clients, and the daemon's own ROUTER
on a temporary path."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fakes import FakeEngine
from latentd.zmtp_router import ZmtpRouter
from latentd_client import AsyncClient, Client
from serving import Blocking, Peer, serving
from wire_peers import MAX_FRAME_BYTES, MAX_FRAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from serving import Running


@pytest.fixture
def running(endpoint: str) -> Iterator[Running]:
    """A server over the fake engine."""
    with serving(endpoint) as running:
        yield running


@pytest.fixture(params=["client", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes a client; the asynchronous one behind blocking methods."""
    with asyncio.Runner() as runner:

        async def start(endpoint: str, **options: Any) -> AsyncClient:
            return await AsyncClient(endpoint, **options).connect()

        def connect(endpoint: str, **options: Any) -> Any:
            if request.param == "client":
                return Client(endpoint, **options)
            return Blocking(runner.run(start(endpoint, **options)), runner)

        yield connect


@pytest.fixture
def engine() -> FakeEngine:
    """What `peer` and `client` are served by."""
    return FakeEngine()


@pytest.fixture
def peer(endpoint: str, engine: FakeEngine) -> Iterator[Peer]:
    """A session by hand, of a server over `engine`."""
    with serving(endpoint, engine), Peer(endpoint) as peer:
        yield peer.hello()


@pytest.fixture
def client(endpoint: str, engine: FakeEngine, connect: Callable[..., Any]) -> Iterator[Any]:
    """Each client in turn, of a server over `engine`."""
    with serving(endpoint, engine), connect(endpoint) as client:
        yield client


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `router` listens; short enough for a socket."""
    return tmp_path_factory.mktemp("z") / "s"


@pytest.fixture
def router(path: Path) -> Iterator[ZmtpRouter]:
    """A router of the test's own thread."""
    router = ZmtpRouter(MAX_FRAME_BYTES, MAX_FRAMES)
    router.bind(f"ipc://{path}")
    yield router
    router.close(0)
