import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from latentd.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(2)
        yield receiver


def environ(receiver: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": receiver.getsockname(), **more}


def test_fields_arrive_as_one_datagram_of_lines(manager: socket.socket) -> None:
    Notifier(environ(manager)).send(READY=1, STATUS="serving\ntwo lines")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving two lines"


def test_loading_extends_the_start_timeout(manager: socket.socket) -> None:
    Notifier(environ(manager)).loading("weights 5 %", extend_s=3)
    assert manager.recv(4096) == b"STATUS=weights 5 %\nEXTEND_TIMEOUT_USEC=3000000"


def test_an_abstract_name_works() -> None:
    name = f"latentd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(2)
        Notifier({"NOTIFY_SOCKET": "@" + name}).send(STOPPING=1)
        assert receiver.recv(100) == b"STOPPING=1"


def test_the_watchdog_is_fed_once_in_its_interval(manager: socket.socket) -> None:
    notifier = Notifier(environ(manager, WATCHDOG_USEC="60000000"))
    notifier.tick()
    notifier.tick()
    assert manager.recv(100) == b"WATCHDOG=1"
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_a_watchdog_meant_for_another_process_is_not_fed(manager: socket.socket) -> None:
    Notifier(environ(manager, WATCHDOG_USEC="60000000", WATCHDOG_PID="1")).tick()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


@pytest.mark.parametrize("address", [{}, {"NOTIFY_SOCKET": "/nowhere/notify"}])
def test_without_a_manager_nothing_happens(address: dict[str, str]) -> None:
    notifier = Notifier(address)
    notifier.send(READY=1)
    notifier.tick()
