"""A server on a thread for tests, and a peer that speaks the wire format by hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any

import zmq

from fakes import FakeEngine
from gates import wait_until
from latentd import snapshot
from latentd.options import ServerOptions
from latentd.server import Server
from latentd.zmtp_router import ZmtpRouter
from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gates import Gate
    from latentd.engine import Engine


class Running:
    """A server and the thread that runs it; `error` is what `serve` raised."""

    def __init__(
        self, engine: Engine, options: ServerOptions, restore: Path | None = None,
        listening: Mapping[str, socket.socket] | None = None,
    ) -> None:  # fmt: skip
        """`restore` is a snapshot to begin with; `listening` has sockets that are bound already."""
        self.engine = engine
        self.server = Server(engine, options, handed_over=listening)
        if restore is not None:
            assert snapshot.restore(engine, self.server.sessions, restore)
        self.server.bind()
        self.endpoint = self.server.endpoint
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.server.serve()
        except Exception as error:
            self.error = error

    def stop(self, drain_s: float = 0.0) -> None:
        self.server.stop(drain_s)
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(endpoint: str, engine: Engine | None = None, **options: Any) -> Iterator[Running]:
    """A running server; keyword arguments are fields of ServerOptions."""
    engine = FakeEngine() if engine is None else engine
    running = Running(engine, ServerOptions(endpoint=endpoint, **{"spin_us": 0, **options}))
    try:
        yield running
    finally:
        running.stop()


class Peer:
    """A DEALER that sends what it is told, well-formed or not."""

    def __init__(
        self, endpoint: str, receive_queue: int = 1000, is_immediate: bool = False,
        before_connect: Callable[[zmq.Socket[bytes]], object] = lambda dealer: None,
    ) -> None:  # fmt: skip
        """`is_immediate`: with the option that the clients' sockets have."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.setsockopt(zmq.IMMEDIATE, int(is_immediate))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        before_connect(self.socket)
        self.socket.connect(endpoint)
        self.session = ""
        self.sent_bytes = 0
        self._id = 0

    def send(self, op: str, raw: Sequence[Any] = (), **fields: Any) -> int:
        """Send a request of this peer's session; returns its id."""
        self._id += 1
        header = {"v": 1, "id": self._id, "op": op}
        if self.session:
            header["session"] = self.session
        frames = protocol.encode({**header, **fields}, raw)
        self.sent_bytes += sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames)
        self.socket.send_multipart(frames)
        return self._id

    def receive(self) -> tuple[dict[str, Any], list[Any]]:
        """The next reply: header and raw frames."""
        frames = self.socket.recv_multipart()
        header = protocol.decode_header(frames[0])
        return header, protocol.decode_raw(header, frames[1:])

    def ask(self, op: str, raw: Sequence[Any] = (), **fields: Any) -> dict[str, Any]:
        """A request's reply, without raw frames."""
        request_id = self.send(op, raw, **fields)
        header, _ = self.receive()
        assert header["id"] == request_id
        return header

    def hello(self) -> Peer:
        self.session = self.ask("hello", versions=[1, 1])["session"]
        return self

    def open(self, prompt: Sequence[int] = (1, 2, 3), key: str = "k", **fields: Any) -> Any:
        return self.ask("open", key=key, prompt=list(prompt), **fields)

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def arriving(running: Running, *peers: Peer) -> Iterator[None]:
    """While the daemon waits for a launch: what these peers send within has arrived at its end."""
    wait_until(lambda: bool(running.engine.launches.in_flight))
    before = sum(peer.sent_bytes for peer in peers)
    yield
    sent = sum(peer.sent_bytes for peer in peers) - before
    wait_until(lambda: num_unread(running) == sent)


def num_unread(running: Running) -> int:
    """Bytes of all peers that the daemon has not read yet."""
    listener = running.server._listener
    assert listener is not None
    router = listener.router
    assert isinstance(router, ZmtpRouter)
    size = array("i", [0])
    total = 0
    for peer in list(router._peers.values()):
        fcntl.ioctl(peer.socket, termios.FIONREAD, size)
        total += size[0]
    return total


def tcp_endpoint() -> str:
    """One on loopback for a daemon that comes again there: its port and the one beside it are free,
    and below those that the system gives to whoever connects to something meanwhile."""
    for port in range(10_000 + os.getpid() % 10_000 * 2, 32_000, 2):
        with socket.socket() as data, socket.socket() as control, contextlib.suppress(OSError):
            data.bind(("127.0.0.1", port))
            control.bind(("127.0.0.1", port + 1))
            return f"tcp://127.0.0.1:{port}"
    raise AssertionError("no port is free")


@contextlib.contextmanager
def halted(endpoint: str, gate: Gate) -> Iterator[None]:
    """The engine stands still within, in a step of a peer that is closed afterwards: nobody is
    answered."""
    with Peer(endpoint) as peer:
        row = seat(peer.hello().open())
        gate.shut()
        peer.send("step", **row)
        gate.await_launch()
        try:
            yield
        finally:
            gate.open()
        assert peer.receive()[0]["status"] == "ok"
        assert peer.ask("close")["status"] == "ok"


def lapse(running: Running, token: str) -> None:
    """Have the lease of a session run out now."""
    running.server.sessions._by_token[token].expires_at = time.monotonic()


def seat(opened: dict[str, Any]) -> dict[str, Any]:
    """The fields that name an opened slot at its length."""
    return {"slot": opened["slot"], "epoch": opened["epoch"], "pos": opened["context_len"]}


class Blocking:
    """An AsyncClient or AsyncSlot with blocking methods, so that both clients share their tests."""

    def __init__(self, target: Any, runner: Any) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "step" and args and isinstance(args[0], list):
                args = ([(slot._target, token) for slot, token in args[0]],)
            result = value(*args, **kwargs)
            if name in ("stream", "resume_stream"):
                return self._iterate(result)
            result = self._runner.run(_wait(result))
            return Blocking(result, self._runner) if name in ("open", "fork", "adopt") else result

        return call

    def _iterate(self, stream: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._runner.run(_wait(stream.__anext__()))
            except StopAsyncIteration:
                return

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._target.close())


async def _wait(awaitable: Any) -> Any:
    return await awaitable
