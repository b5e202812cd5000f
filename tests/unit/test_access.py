"""Who may connect on ipc, who may drain, and whose a session is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from fakes import FakeEngine
from gates import wait_until
from latentd import credentials, snapshot
from latentd.access import Access, AccessError, read_keys
from latentd.credentials import UNKNOWN, Credentials
from latentd.options import AccessOptions, ServerOptions
from latentd.settings import ConfigError
from latentd.sources import read
from latentd_client import AsyncClient, Client, ConnectionLost, Control, RequestRejected
from serving import Peer, Running, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRANGER, FRIEND, GROUP = 54321, 12345, 23456
KEYS = ("k" * 40, "#" + "z" * 39)


def user(uid: int, *groups: int) -> Credentials:
    return Credentials(uid, uid, 4321, frozenset((uid, *groups)))


class Disguise:
    """What the system tells the daemon of whoever connects from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._told = credentials.of_socket
        self.who: Credentials | None = None
        monkeypatch.setattr(credentials, "of_socket", lambda sock: self.who or self._told(sock))


@pytest.fixture
def disguise(monkeypatch: pytest.MonkeyPatch) -> Disguise:
    return Disguise(monkeypatch)


@pytest.fixture
def guarded(endpoint: str) -> Iterator[Running]:
    options = AccessOptions(frozenset([FRIEND]), frozenset([GROUP]), frozenset([FRIEND]))
    with serving(endpoint, access=options) as running:
        yield running


def test_the_system_tells_user_process_and_all_groups_of_a_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        who = credentials.of_socket(ours)
    assert (who.user, who.group, who.process) == (os.getuid(), os.getgid(), os.getpid())
    assert who.groups == frozenset((os.getgid(), *os.getgroups()))


class Impostor(threading.Thread):
    """A thread that becomes another user, alone: the C library would have all threads become it."""

    NUMBERS: ClassVar = {"setgroups": 116, "setresuid": 117, "setresgid": 119}  # of x86-64

    def __init__(self, uid: int, groups: list[int], act: Callable[[], object]) -> None:
        super().__init__()
        self._uid, self._groups, self._act = uid, groups, act
        self.error: Exception | None = None
        self.start()
        self.join()

    def _call(self, name: str, *args: object) -> None:
        assert ctypes.CDLL(None).syscall(self.NUMBERS[name], *args) == 0

    def run(self) -> None:
        groups = (ctypes.c_uint32 * len(self._groups))(*self._groups)
        self._call("setgroups", len(groups), groups)
        self._call("setresgid", *[self._uid] * 3)
        self._call("setresuid", *[self._uid] * 3)
        try:
            self._act()
        except Exception as error:
            self.error = error


@pytest.mark.skipif(
    os.getuid() != 0 or platform.machine() != "x86_64", reason="only root becomes another user"
)
def test_another_user_is_seen_as_what_he_is(endpoint: str) -> None:
    def meet() -> None:
        with Client(endpoint, spin_s=0) as client, Control(client.info.control) as control:
            seen.extend(control.sessions())
            control.drain()

    seen: list[dict[str, object]] = []
    access = AccessOptions(frozenset([FRIEND]), frozenset([GROUP]))
    with serving(endpoint, access=access) as running:
        for where in (endpoint, running.server.control_endpoint):
            Path(where.removeprefix("ipc://")).chmod(0o666)
        Path(endpoint.removeprefix("ipc://")).parent.chmod(0o711)
        for uid, groups, code in (
            (STRANGER, [STRANGER + 1], "allow_users"),
            (STRANGER, [STRANGER + 1, GROUP], "drain: user 54321 is neither root"),
            (FRIEND, [], "drain: user 12345 is neither root"),
        ):
            assert code in str(Impostor(uid, groups, meet).error)
        assert [(told["user"], told["group"]) for told in seen] == [
            (STRANGER, STRANGER), (FRIEND, FRIEND),
        ]  # fmt: skip
        assert seen[0]["process"] == os.getpid()


@pytest.mark.parametrize(
    ("options", "who", "is_in", "is_admin"),
    [
        (AccessOptions(), user(STRANGER), True, False),
        (AccessOptions(), user(0), True, True),
        (AccessOptions(), user(os.getuid()), True, True),
        (AccessOptions(), UNKNOWN, True, False),
        (AccessOptions(frozenset([FRIEND])), user(STRANGER), False, False),
        (AccessOptions(frozenset([FRIEND])), user(FRIEND), True, False),
        (AccessOptions(frozenset([FRIEND])), user(0), True, True),
        (AccessOptions(allow_groups=frozenset([GROUP])), user(STRANGER), False, False),
        (AccessOptions(allow_groups=frozenset([GROUP])), user(STRANGER, GROUP), True, False),
        (AccessOptions(frozenset([1]), admin_users=frozenset([FRIEND])), user(FRIEND), True, True),
        (AccessOptions(admin_users=frozenset([FRIEND])), user(STRANGER), True, False),
        (AccessOptions(admin_users=frozenset([FRIEND])), UNKNOWN, True, False),
        (AccessOptions(), Credentials(key=KEYS[0]), False, False),
    ],
)
def test_who_may_connect_and_who_may_drain_follows_the_lists(
    options: AccessOptions, who: Credentials, is_in: bool, is_admin: bool
) -> None:
    access = Access(options)
    assert (access.admits(who), access.is_admin(who)) == (is_in, is_admin)


def test_who_is_not_listed_is_told_so_on_both_sockets_by_every_client(
    guarded: Running, disguise: Disguise, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect() -> None:
        async with AsyncClient(guarded.endpoint):
            pass

    def meet() -> None:
        Client(guarded.endpoint)

    with Client(guarded.endpoint) as good:
        disguise.who = user(STRANGER)
        for call in (
            meet,
            lambda: asyncio.run(connect()),
            lambda: Control(guarded.server.control_endpoint),
        ):
            with pytest.raises(RequestRejected, match="allow_users") as refused:
                call()
            assert refused.value.code == "denied"
        assert good.open([1, 2]).step().context_len == 3
    assert any("user 54321, who may not connect" in line for line in caplog.messages)


@pytest.mark.parametrize("who", [user(FRIEND), user(STRANGER, GROUP), user(0)], ids=str)
def test_who_is_listed_is_served(guarded: Running, disguise: Disguise, who: Credentials) -> None:
    disguise.who = who
    with Client(guarded.endpoint) as client, Control(guarded.server.control_endpoint) as control:
        assert client.open([1, 2]).step().context_len == 3
        assert control.health()["state"] == "ready"


def test_who_is_struck_off_the_list_is_turned_out_with_all_that_was_his(
    guarded: Running, disguise: Disguise
) -> None:
    with Client(guarded.endpoint) as good:
        kept = good.open([1, 2, 3])
        disguise.who = user(STRANGER, GROUP)
        client = Client(guarded.endpoint)
        client.open([1, 2])
        guarded.server.access.reload(AccessOptions(frozenset([FRIEND])))
        wait_until(lambda: guarded.engine.slots.num_used == 1)
        with contextlib.suppress(ConnectionLost, RequestRejected):  # or: in the middle of a call
            client.ping()
        with pytest.raises(RequestRejected, match="allow_users"):
            client.open([1, 2])
        client.close()
        assert kept.step().context_len == 4


def test_only_admins_drain(guarded: Running, disguise: Disguise) -> None:
    disguise.who = user(STRANGER, GROUP)
    with Control(guarded.server.control_endpoint) as control:
        with pytest.raises(RequestRejected, match="drain: user 54321 is neither root") as refused:
            control.drain(1.0)
        assert refused.value.code == "denied"
        assert control.health()["state"] == "ready"
    disguise.who = user(FRIEND)
    with Control(guarded.server.control_endpoint) as control:
        for path in ("/etc/x", "/tmp/\0", "x"):
            with pytest.raises(RequestRejected, match="drain: field save"):
                control.drain(1.0, path)
        control.drain(1.0)
    guarded.thread.join(60)
    assert not guarded.thread.is_alive()


def test_nobody_may_drain_over_tcp_where_users_are_unknown() -> None:
    with serving("tcp://127.0.0.1:*") as running, Control(running.server.control_endpoint) as tcp:
        with pytest.raises(RequestRejected, match="unknown user"):
            tcp.drain(1.0)
        assert tcp.health()["state"] == "ready"


def test_a_token_that_another_user_has_seen_is_of_no_use_to_him(
    endpoint: str, disguise: Disguise
) -> None:
    with serving(endpoint) as running, Peer(endpoint) as owner:
        opened = owner.hello().open()
        disguise.who = user(STRANGER)
        with Peer(endpoint) as thief, Control(running.server.control_endpoint) as control:
            thief.session = owner.session
            for op, fields in (
                ("step", seat(opened)),
                ("resume", {}),
                ("close", {}),
                ("export", {**seat(opened), "first": 0, "count": 1}),
            ):
                assert thief.ask(op, **fields)["status"] == "denied"
            for call in (control.renew, lambda token: control.cancel(token, 1)):
                with pytest.raises(RequestRejected, match="another user's"):
                    call(owner.session)
        assert owner.ask("step", **seat(opened))["context_len"] == 4


def test_a_session_is_still_its_users_after_a_restart(
    endpoint: str, disguise: Disguise, tmp_path: Path
) -> None:
    engine = FakeEngine()
    disguise.who = user(STRANGER)
    with serving(endpoint, engine) as running, Peer(endpoint) as owner:
        opened = owner.hello().open()
        running.stop()
        snapshot.save(engine, running.server.sessions, tmp_path / "saved")
    restored = Running(FakeEngine(), ServerOptions(endpoint=endpoint), tmp_path / "saved")
    disguise.who = user(FRIEND)
    with Peer(endpoint) as thief:
        thief.session = owner.session
        assert thief.ask("step", **seat(opened))["status"] == "denied"
    disguise.who = user(STRANGER)
    with Peer(endpoint) as again:
        again.session = owner.session
        assert again.ask("step", **seat(opened))["context_len"] == 4
    restored.stop()


def test_stats_tell_whose_the_sessions_are_and_others_only_of_their_own(
    guarded: Running, disguise: Disguise
) -> None:
    with Client(guarded.endpoint) as first:
        first.open([1])
        disguise.who = user(STRANGER, GROUP)
        with Client(guarded.endpoint), Control(guarded.server.control_endpoint) as control:
            (own,) = control.sessions()
            assert (own["user"], own["process"], own["slots"]) == (STRANGER, 4321, 0)
            assert control.stats()["server"]["sessions"] == 2
            disguise.who = None
            with Control(guarded.server.control_endpoint) as admin:
                newest, oldest = admin.sessions()
            assert newest == {**own, "silent_s": newest["silent_s"]}
            assert (oldest["user"], oldest["process"]) == (os.getuid(), os.getpid())
            assert (oldest["slots"], oldest["number"]) == (1, 1)


def test_lists_of_users_and_a_tcp_socket_without_curve_contradict_each_other() -> None:
    for name in ("endpoint", "control_endpoint"):
        given = {name: "tcp://127.0.0.1:5555", "allow_users": str(FRIEND)}
        with pytest.raises(ConfigError, match=rf"every user .* set curve_key .*{name} = 'tcp:"):
            read(given, {})
        read({**given, "curve_key": "/k", "curve_clients": "/c"}, {})


def test_a_file_of_keys_has_a_line_for_each_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.write_text(f"# ours\n\n{KEYS[0]} alice's laptop\n#\n{KEYS[1]}\n")
    path.chmod(0o644)
    assert read_keys("curve_clients", path) == {KEYS[0]: "alice's laptop", KEYS[1]: "line 5"}


@pytest.mark.parametrize(
    ("content", "mode", "text"),
    [
        (b"alice " + b"k" * 40, 0o600, "line 1 of .* does not begin with a public key"),
        (b"k" * 41, 0o600, "line 1 of"),
        (b"\xff\xfe", 0o600, "cannot read"),
        (b"#" * (1 << 20) + b"#", 0o600, "at most 1048576 bytes"),
        (b"", 0o666, "mode 0666: others may write"),
    ],
    ids=["no key", "too long", "no text", "too large", "others write"],
)
def test_a_file_of_keys_that_cannot_be_right_is_refused(
    tmp_path: Path, content: bytes, mode: int, text: str
) -> None:
    path = tmp_path / "clients"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(AccessError, match=f"curve_clients: .*{text}"):
        read_keys("curve_clients", path)


def test_a_file_of_keys_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="No such file"):
        read_keys("curve_admins", tmp_path / "nobody")


def test_an_admin_has_a_snapshot_saved_beside_the_one_of_the_settings_and_nowhere_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    admin, own = user(FRIEND), user(os.getuid())
    options = AccessOptions(admin_users=frozenset([FRIEND]), save=tmp_path / "saved" / "snapshot")
    access = Access(options)
    for good in ("saved/snapshot", "saved/another"):
        access.check_target(admin, tmp_path / good)
    for bad in ("snapshot", "saved/../x", "saved/a/b", "link/x", "/etc/cron.d/x", "relative"):
        access.check_target(own, tmp_path / bad)
        with pytest.raises(RequestRejected, match="may save beside the setting save only"):
            access.check_target(admin, tmp_path / bad)
    with pytest.raises(RequestRejected, match="not given"):
        Access(replace(options, save=None)).check_target(admin, tmp_path / "saved/snapshot")


def test_ids_and_names_make_lists_of_users_and_unknown_ones_are_refused() -> None:
    config = read({"allow_users": "root, 1234", "allow_groups": "root", "admin_users": "7"}, {})
    options = config.config.access_options()
    assert options.allow_users == frozenset((0, 1234))
    assert (options.admin_users, options.allow_groups) == (frozenset([7]), frozenset([0]))
    for bad in ("nosuchuser", "1,,2", "-1", "4294967295", " "):
        with pytest.raises(ConfigError, match=r"allow_users = .*expected known users by name"):
            read({"allow_users": bad}, {})
