"""Fixtures for unit tests: a server over the fake engine, both clients, CURVE keys, and the
daemon's own ROUTER on a temporary path or a port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from curve_keys import Keys
from fakes import FakeEngine
from latentd.endpoint import Binding
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
def keys(tmp_path: Path) -> Keys:
    """Of a daemon and its clients."""
    return Keys(tmp_path)


@pytest.fixture
def transport() -> str:
    """What `router` listens on: ipc, if a test is not parametrised."""
    return "ipc"


@pytest.fixture
def binding(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binding]:
    """Where `router` listens; a path is short enough for a socket."""
    path = tmp_path_factory.mktemp("z") / "s"
    binding = Binding(f"ipc://{path}" if transport == "ipc" else "tcp://127.0.0.1:*")
    yield binding
    binding.release()


@pytest.fixture
def where(binding: Binding) -> str:
    """The endpoint of `router`."""
    return binding.endpoint


@pytest.fixture
def router(binding: Binding) -> Iterator[ZmtpRouter]:
    """A router of the test's own thread."""
    router = ZmtpRouter(binding.socket, MAX_FRAME_BYTES, MAX_FRAMES)
    yield router
    router.close(0)
