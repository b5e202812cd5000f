"""tcp with CURVE: who has a key that is listed is served, everybody else is told why not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import zmq

from curve_keys import ANYWHERE, Keys, dress
from gates import wait_until
from latentd.__main__ import main
from latentd.access import AccessError
from latentd.endpoint import EndpointError
from latentd.options import AccessOptions, ServerOptions
from latentd.preflight import check_endpoints
from latentd.settings import ConfigError
from latentd.sources import read
from latentd_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    Control,
    CurveKeys,
    KeyFault,
    LatentdError,
    RequestRejected,
    protocol,
)
from latentd_client.keys import read_pair, write_pair
from latentd_client.zmtp import GREETING
from serving import Peer, seat, serving, tcp_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Running


@pytest.fixture
def guarded(keys: Keys) -> Iterator[Running]:
    with serving(ANYWHERE, access=keys.options) as running:
        yield running


async def meet(endpoint: str, keys: CurveKeys | None, timeout_s: float) -> None:
    async with AsyncClient(endpoint, keys=keys, connect_timeout_s=timeout_s) as client:
        assert (await (await client.open([1, 2])).step()).context_len == 3


def calls(
    running: Running, keys: CurveKeys | None, timeout_s: float = 10.0
) -> dict[str, Callable[[], object]]:
    """Every way to connect."""
    where = running.endpoint

    def step() -> None:
        with Client(where, keys=keys, connect_timeout_s=timeout_s) as client:
            assert client.open([1, 2]).step().context_len == 3
            assert client.health()["state"] == "ready"

    def ask() -> None:
        with Control(running.server.control_endpoint, keys=keys, timeout_s=timeout_s) as control:
            assert control.health()["state"] == "ready"

    return {
        "client": step,
        "async": lambda: asyncio.run(meet(where, keys, timeout_s)),
        "control": ask,
    }


def test_a_listed_client_is_served_on_both_sockets(guarded: Running, keys: Keys) -> None:
    for call in calls(guarded, keys.of(keys.alice)).values():
        call()


@pytest.mark.parametrize("way", ["client", "async", "control"])
def test_who_is_not_let_in_is_told_why_at_once(guarded: Running, keys: Keys, way: str) -> None:
    stranger = CurveKeys(keys.alice, keys.mallory.public)
    with Client(guarded.endpoint, keys=keys.of(keys.alice)) as good:
        slot = good.open([1, 2])
        for wrong, kind, text in (
            (None, LatentdError, "wants CURVE keys"),
            (keys.of(keys.mallory), RequestRejected, r"not among .*curve_clients"),
            (stranger, ConnectionLost, "is the server key its own"),
        ):
            start = time.monotonic()
            with pytest.raises(kind, match=text):
                calls(guarded, wrong)[way]()
            assert time.monotonic() - start < 5
        assert slot.step().context_len == 3


@pytest.mark.parametrize("way", ["client", "async", "control"])
def test_a_client_with_keys_does_not_talk_to_a_daemon_that_does_not_encrypt(
    keys: Keys, way: str
) -> None:
    with serving(ANYWHERE) as running, pytest.raises(LatentdError, match=r"keys? out|server key"):
        calls(running, keys.of(keys.alice))[way]()


@pytest.mark.parametrize("way", ["client", "async"])
def test_a_daemon_that_does_not_answer_is_given_up_after_the_time_to_connect(
    keys: Keys, way: str
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        silent.unbind(f"tcp://127.0.0.1:{port}")
        with serving(ANYWHERE) as running:
            running.endpoint = f"tcp://127.0.0.1:{port}"
            with pytest.raises(ConnectionLost, match=r"did not say hello within 0\.3 s"):
                calls(running, keys.of(keys.alice), 0.3)[way]()


def test_only_the_admins_keys_drain(guarded: Running, keys: Keys) -> None:
    where = guarded.server.control_endpoint
    with Control(where, keys=keys.of(keys.alice)) as control:
        with pytest.raises(RequestRejected, match=r"drain: key .* nor an admin"):
            control.drain(1.0)
        with pytest.raises(RequestRejected, match="nor an admin"):
            control.drain(1.0, "/tmp/anywhere")
    with Control(where, keys=keys.of(keys.root)) as control:
        control.drain(1.0)
    guarded.thread.join(60)
    assert not guarded.thread.is_alive()


def test_another_clients_key_does_not_use_a_session_whose_token_it_has(
    guarded: Running, keys: Keys
) -> None:
    with Client(guarded.endpoint, keys=keys.of(keys.alice)) as alice:
        token = alice._session.calls.session
        with Control(guarded.server.control_endpoint, keys=keys.of(keys.root)) as other:
            with pytest.raises(RequestRejected, match="another user's"):
                other.renew(token)
            (told,) = other.sessions()
        assert (told["key"], told["name"], told["address"]) == (
            keys.alice.public, "a client", "127.0.0.1",
        )  # fmt: skip


class Named(Peer):
    """A client that has chosen its own routing id, as raw ones may."""

    def __init__(self, endpoint: str, keys: CurveKeys, name: bytes) -> None:
        def before_connect(dealer: zmq.Socket[bytes]) -> None:
            dealer.setsockopt(zmq.ROUTING_ID, name)
            dress(dealer, keys)

        super().__init__(endpoint, before_connect=before_connect)


def test_who_takes_the_routing_id_of_one_who_has_gone_is_not_taken_for_him(
    guarded: Running, keys: Keys
) -> None:
    alice, root = keys.of(keys.alice), keys.of(keys.root)
    with Named(guarded.endpoint, root, b"same") as owner:
        opened = owner.hello().open()
    with Named(guarded.server.control_endpoint, root, b"same") as admin:
        assert admin.ask("health")["status"] == "ok"
    request = {"session": owner.session, **seat(opened)}
    assert ask_as(guarded.endpoint, alice, "step", request)["status"] == "denied"
    assert ask_as(guarded.server.control_endpoint, alice, "drain", {})["status"] == "denied"


def ask_as(where: str, keys: CurveKeys, op: str, given: dict[str, Any]) -> dict[str, Any]:
    """The reply to a client that takes the id of one who has gone: until libzmq has seen that one
    go it ignores the next one."""
    for _ in range(20):
        with Named(where, keys, b"same") as peer, contextlib.suppress(zmq.Again):
            peer.socket.setsockopt(zmq.RCVTIMEO, 500)
            return peer.ask(op, **given)
    raise AssertionError("no answer")


def test_garbage_and_half_a_handshake_harm_nobody(guarded: Running, keys: Keys) -> None:
    port = int(guarded.endpoint.rpartition(":")[2])
    with Client(guarded.endpoint, keys=keys.of(keys.alice)) as client:
        slot = client.open([1, 2])
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for number, sock in enumerate(sockets):
            sock.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", GREETING, os.urandom(4096))[number % 4])
        assert slot.step().context_len == 3
        for sock in sockets:
            sock.close()
        assert slot.step().context_len == 4


def test_a_key_that_is_struck_off_is_told_so_and_comes_back_when_it_is_listed_again(
    guarded: Running, keys: Keys
) -> None:
    access = guarded.server.access
    own = keys.of(keys.alice)
    with (
        Client(guarded.endpoint, keys=own) as client,
        Control(guarded.server.control_endpoint, keys=own) as control,
        Named(guarded.endpoint, own, b"late") as late,
    ):
        client.open([1, 2])
        late.ask("ping")
        assert control.health()["state"] == "ready"
        keys.list(keys.mallory)
        access.reload(keys.options)
        wait_until(lambda: guarded.engine.slots.num_used == 0)
        with pytest.raises(LatentdError, match="session"):
            client.open([1, 2])
        with pytest.raises(RequestRejected, match="not among"):
            control.health()
        assert late.ask("hello", versions=[1, 1])["status"] == "denied"
        with pytest.raises(RequestRejected, match="not among"):
            Client(guarded.endpoint, keys=own)
        keys.list(keys.alice)
        access.reload(keys.options)
        with Client(guarded.endpoint, keys=own) as fresh:
            assert fresh.open([1, 2]).step().context_len == 3


Call: TypeAlias = "Callable[[], object]"


def _connected(
    runner: asyncio.Runner, where: str, keys: CurveKeys, is_async: bool
) -> tuple[Call, Call]:
    """How a client of either kind pings and closes."""
    if not is_async:
        client = Client(where, keys=keys, timeout_s=10)
        return client.ping, client.close
    tasks = runner.run(AsyncClient(where, keys=keys, timeout_s=10).connect())
    return lambda: runner.run(tasks.ping()), lambda: runner.run(tasks.close())


@pytest.mark.parametrize("is_async", [False, True], ids=["client", "async"])
def test_a_reconnection_that_is_refused_is_told_to_the_next_call(
    keys: Keys, is_async: bool
) -> None:
    own = keys.of(keys.alice)
    with asyncio.Runner() as runner:
        where = tcp_endpoint()
        with serving(where, access=keys.options):
            ping, close = _connected(runner, where, own, is_async)
            ping()
        keys.list(keys.mallory)
        with serving(where, access=keys.options):
            answers = []
            for _ in range(100):  # the first may only learn that the connection broke
                try:
                    ping()
                except LatentdError as error:
                    answers.append(error)
                if answers and answers[-1].code == "denied":
                    break
            assert "not among" in str(answers[-1])
            close()


def test_a_list_that_cannot_be_read_leaves_the_old_one(guarded: Running, keys: Keys) -> None:
    keys.clients.write_text("nonsense\n")
    with pytest.raises(AccessError, match="line 1"):
        guarded.server.access.reload(keys.options)
    for call in calls(guarded, keys.of(keys.alice)).values():
        call()


@pytest.mark.parametrize("where", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555"])
def test_other_machines_are_served_with_curve_only(keys: Keys, where: str) -> None:
    with pytest.raises(EndpointError, match=r"loopback only .*latentd keygen.*curve_clients"):
        check_endpoints(ServerOptions(endpoint=where))


def test_a_daemon_at_all_addresses_is_reached_on_its_control_socket_too(keys: Keys) -> None:
    with serving("tcp://0.0.0.0:*", access=keys.options) as running:
        port = running.endpoint.rpartition(":")[2]
        with Client(f"tcp://127.0.0.1:{port}", keys=keys.of(keys.alice)) as client:
            assert client.info.control.startswith("tcp://127.0.0.1:")
            assert client.health()["state"] == "ready"
    assert protocol.as_seen_from("ipc:///a", "tcp://0.0.0.0:1") == "tcp://0.0.0.0:1"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"curve_key": "nobody", "curve_clients": "clients"}, "curve_key: .*nobody: No such file"),
        ({"curve_key": "clients", "curve_clients": "clients"}, "curve_key: .* mode 0644"),
    ],
)
def test_rules_that_cannot_be_are_refused_before_weights_are_loaded(
    keys: Keys, given: dict[str, str], text: str
) -> None:
    files = {name: keys.folder / path for name, path in given.items()}
    access = replace(AccessOptions(), **files)  # type: ignore[arg-type]
    keys.clients.chmod(0o644)
    with pytest.raises(AccessError, match=text):
        check_endpoints(ServerOptions(endpoint="tcp://127.0.0.1:5555", access=access))


def test_a_key_of_the_daemon_and_a_list_of_clients_keys_need_each_other() -> None:
    with pytest.raises(ConfigError, match="curve_key needs curve_clients or curve_admins"):
        read({"curve_key": "/key"}, {})
    for name in ("curve_clients", "curve_admins"):
        with pytest.raises(ConfigError, match=f"need curve_key, .*{name} = '/list' from flag"):
            read({name: "/list"}, {})
        read({"curve_key": "/key", name: "/list"}, {})


def test_a_key_file_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    pair = write_pair(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_pair(path) == pair
    with pytest.raises(KeyFault, match="File exists"):
        write_pair(path)
    assert read_pair(path) == pair
    assert pair.secret not in repr(pair) + repr(CurveKeys(pair, pair.public))


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        ("", 0o600, "No public key found"),
        ('public-key = "short"\nsecret-key = "short"\n', 0o600, "one of its keys is not a key"),
        ("public-key\n", 0o600, "key file"),
        ("#" * 5000, 0o600, "no file of `latentd keygen`"),
        ("", 0o640, "mode 0640 lets others read it"),
        (f'public-key = "{"a" * 40}"\nsecret-key = "{"b" * 40}"\n', 0o600, "not that of"),
    ],
    ids=["empty", "short keys", "no value", "too large", "others read", "no pair"],
)
def test_a_key_file_that_cannot_be_right_is_refused_without_its_content(
    tmp_path: Path, content: str, mode: int, text: str
) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(KeyFault, match=text):
        read_pair(path)


def test_keys_come_from_the_environment_for_tcp_alone(
    endpoint: str, guarded: Running, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTD_CLIENT_KEY", str(keys.folder / "alice"))
    with pytest.raises(KeyFault, match="go together"):
        Client(guarded.endpoint)
    monkeypatch.setenv("LATENTD_SERVER_KEY", "nonsense")
    with pytest.raises(KeyFault, match="the daemon's key is not a key"):
        Client(guarded.endpoint)
    with serving(endpoint), Client(endpoint) as local:
        local.ping()
    monkeypatch.setenv("LATENTD_SERVER_KEY", keys.server.public)
    with Client(guarded.endpoint) as client:
        client.ping()
    with pytest.raises(KeyFault, match="must be a latentd_client"):
        Client(guarded.endpoint, keys="alice")  # type: ignore[arg-type]


def test_keygen_writes_a_pair_and_prints_what_the_other_side_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "key")
    assert main(["keygen", path]) == 0
    assert main(["keygen", "--public", path]) == 0
    pair = read_pair(path)
    assert capsys.readouterr().out == f"{pair.public}\n" * 2
    assert main(["keygen", path]) == 1
    assert (
        capsys.readouterr().err
        == f"latentd keygen: key file {path}: File exists; nothing is written\n"
    )
    assert read_pair(path) == pair


def test_the_commands_take_keys_as_flags(
    guarded: Running,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LATENTD_CLIENT_KEY", "LATENTD_SERVER_KEY"):
        monkeypatch.setenv(name, "")
    where = ["--endpoint", guarded.endpoint, "--control-endpoint", guarded.server.control_endpoint]
    assert main(["status", *where, "--timeout-s", "9"]) == 1
    assert "wants CURVE keys" in capsys.readouterr().err
    flags = ["--client-key", str(keys.folder / "root"), "--server-key", keys.server.public]
    with Client(guarded.endpoint, keys=keys.of(keys.alice)) as client:
        client.open([1])
        assert main(["status", *where, *flags]) == 0
        line = f"a client, key {keys.alice.public}, at 127.0.0.1\n"
        assert line in capsys.readouterr().out
    assert main(["drain", *where, *flags]) == 0
    assert capsys.readouterr().out.startswith("the daemon does not answer any more")
