"""Sockets that a service manager has bound: taken, served, and left where they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fakes import FakeEngine
from latentd.endpoint import EndpointError
from latentd.options import ServerOptions
from latentd.preflight import check_endpoints
from latentd.server import Server
from latentd_client import Client
from processes import environment
from serving import Running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

TAKE = """
import os, sys
from latentd import handed_over
from latentd.endpoint import EndpointError
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
try:
    taken = handed_over.take()
except EndpointError as error:
    sys.exit(str(error))
print(*taken, *(name for name in os.environ if name.startswith("LISTEN_")))
assert not (taken and any(map(os.get_inheritable, (3, 4))))
"""


def listen(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket as systemd would bind it."""
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    if kind == socket.SOCK_STREAM:
        sock.listen()
    return sock


def take(
    first: socket.socket, second: socket.socket | TextIO, other_pid: bool = False
) -> subprocess.CompletedProcess[str]:
    """What a process makes of two descriptors, 3 and 4, that are for it or for another one."""

    def place() -> None:
        spare = [os.dup(first.fileno()), os.dup(second.fileno())]
        high = [os.dup2(fd, 10 + number) for number, fd in enumerate(spare)]
        for number, fd in enumerate(high):
            os.dup2(fd, 3 + number)

    return subprocess.run(
        [sys.executable, "-c", TAKE, str(int(other_pid))],
        env=environment(LISTEN_FDS="2", LISTEN_FDNAMES="a:b"),
        preexec_fn=place, close_fds=False, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for sockets."""
    return tmp_path_factory.mktemp("h", numbered=True)


@pytest.fixture
def listening(folder: Path) -> Iterator[dict[str, socket.socket]]:
    """Both sockets of a daemon, as `take` returns them; and the manager keeps its own."""
    with listen(folder / "d.sock") as data, listen(folder / "d.ctl") as control:
        yield {f"ipc://{folder}/d.sock": data.dup(), f"ipc://{folder}/d.ctl": control.dup()}


def test_sockets_are_taken_by_endpoint_and_the_variables_go(folder: Path) -> None:
    with listen(folder / "a") as first, listen(folder / "b") as second:
        done = take(first, second)
    assert (done.stderr, done.stdout.split()) == ("", [f"ipc://{folder}/a", f"ipc://{folder}/b"])


def test_sockets_for_another_process_are_left_alone(folder: Path) -> None:
    with listen(folder / "a") as first, listen(folder / "b") as second:
        done = take(first, second, other_pid=True)
    assert (done.stderr, done.stdout) == ("", "\n")


def test_a_datagram_socket_is_refused_with_the_way_out(folder: Path) -> None:
    with listen(folder / "a") as first, listen(folder / "b", socket.SOCK_DGRAM) as second:
        done = take(first, second)
    assert done.returncode == 1
    assert f"{folder}/b" in done.stderr
    assert "ListenStream=" in done.stderr


def test_a_descriptor_that_is_no_socket_is_refused(folder: Path) -> None:
    with listen(folder / "a") as first, (folder / "b").open("w") as second:
        done = take(first, second)
    assert done.returncode == 1
    assert "descriptor 4 of the service manager: Socket operation on non-socket" in done.stderr


def test_clients_of_a_handed_over_socket_are_served_and_those_who_came_before_too(
    folder: Path, listening: dict[str, socket.socket]
) -> None:
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(str(folder / "d.sock"))
        options = ServerOptions(f"ipc://{folder}/d.sock")
        running = Running(FakeEngine(), options, listening=listening)
        with Client(running.endpoint) as client:
            assert client.open([1, 2, 3]).context_len == 3
        early.settimeout(10)
        assert early.recv(1) == b"\xff"  # the greeting
        running.stop()


def test_the_paths_outlive_the_daemon_and_the_next_one_serves_who_has_come_meanwhile(
    folder: Path, listening: dict[str, socket.socket]
) -> None:
    again = {endpoint: sock.dup() for endpoint, sock in listening.items()}
    options = ServerOptions(f"ipc://{folder}/d.sock")
    Running(FakeEngine(), options, listening=listening).stop()
    assert (folder / "d.sock").is_socket()
    assert (folder / "d.ctl").is_socket()
    with socket.socket(socket.AF_UNIX) as between:
        between.connect(str(folder / "d.sock"))
        running = Running(FakeEngine(), options, listening=again)
        between.settimeout(10)
        assert between.recv(1) == b"\xff"
        running.stop()


def test_two_daemons_are_never_handed_the_same_path(
    folder: Path, listening: dict[str, socket.socket]
) -> None:
    again = {endpoint: sock.dup() for endpoint, sock in listening.items()}
    options = ServerOptions(f"ipc://{folder}/d.sock")
    running = Running(FakeEngine(), options, listening=listening)
    with pytest.raises(EndpointError, match=f"another latentd .process {os.getpid()}"):
        Server(FakeEngine(), options, handed_over=again).bind()
    running.stop()
    for sock in again.values():
        sock.close()


def test_the_check_before_loading_leaves_handed_over_sockets_bound(
    folder: Path, listening: dict[str, socket.socket]
) -> None:
    check_endpoints(ServerOptions(f"ipc://{folder}/d.sock"), listening)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "d.sock"))
    for sock in listening.values():
        sock.close()


def test_a_handed_over_socket_that_nobody_would_serve_is_refused(
    folder: Path, listening: dict[str, socket.socket]
) -> None:
    with pytest.raises(EndpointError, match=r"listens at .*/d\.sock, but .*other.*Listen"):
        check_endpoints(ServerOptions(f"ipc://{folder}/other.sock"), listening)
    for sock in listening.values():
        sock.close()
