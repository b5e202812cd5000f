"""The serving process over a fake engine: a device fault, and what the service manager hears."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gates import wait_until
from latentd.notify import Notifier
from latentd.options import LifeOptions
from latentd_client import Client, Control, LatentdError
from processes import environment

pytest.importorskip("torch")

SERVE = """
import sys
from pathlib import Path
import latentd.serve
from fakes import FakeEngine
from latentd.notify import Notifier
from latentd.options import EngineOptions, LifeOptions, ServerOptions
from latentd.startup import StartupReport

class Failing(FakeEngine):
    def admit_step(self, *args):
        request = super().admit_step(*args)
        if args[1] == 66:
            self.fake.fault = "cuLaunchKernelEx: 700 an illegal memory access was encountered"
        return request

def start_engine(options, report):
    report("weights: 50 %")
    engine = Failing()
    engine.startup = StartupReport(buckets=engine.info.buckets)
    return engine

latentd.serve.start_engine = start_engine
daemon = latentd.serve.Daemon(LifeOptions(1.0), LifeOptions, Notifier())
sys.exit(daemon.run(EngineOptions(Path("/x")), ServerOptions(endpoint=sys.argv[1])))
"""


INTERRUPTED = """
def start_engine(options, report):
    import time
    report("loading")
    try:
        time.sleep(60)
    except SystemExit:
        {reaction}

latentd.serve.start_engine = start_engine
daemon ="""

RELOADED = """
import os
import signal
from latentd.options import AccessOptions

fresh = LifeOptions(7.0, access=AccessOptions(admin_users=frozenset([54321])))

def start_engine(options, report):
    os.kill(os.getpid(), signal.SIGHUP)
    return Failing()

def serve(engine, options, *rest):
    print(options.drain_s, *options.access.admin_users, flush=True)
    os._exit(0)

latentd.serve.start_engine, latentd.serve.Server = start_engine, serve
daemon ="""


class Manager:
    """A service manager's end of the notify socket, and the process it has started."""

    def __init__(self, folder: Path, script: str = SERVE) -> None:
        self.endpoint = f"ipc://{folder}/latentd.sock"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(60)
        environ = environment(NOTIFY_SOCKET=str(folder / "notify"), WATCHDOG_USEC="600000")
        command = [sys.executable, "-c", script, self.endpoint]
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)

    def wait_for(self, field: str) -> list[str]:
        """All messages up to the one with `field`."""
        messages: list[str] = []
        while not messages or field not in messages[-1].split("\n"):
            messages.append(self.socket.recv(4096).decode())
        return messages

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path) as manager:
        yield manager


def test_start_is_announced_step_by_step_and_the_watchdog_is_fed(manager: Manager) -> None:
    until_ready = manager.wait_for("READY=1")
    assert "STATUS=weights: 50 %\nEXTEND_TIMEOUT_USEC=600000000" in until_ready
    assert not any("WATCHDOG=1" in message for message in until_ready)
    for _ in range(3):
        manager.wait_for("WATCHDOG=1")
    manager.process.terminate()
    manager.wait_for("STOPPING=1")
    assert manager.process.wait(60) == 0


def test_a_device_fault_is_told_to_clients_and_ends_the_process_with_70(manager: Manager) -> None:
    manager.wait_for("READY=1")
    client = Client(manager.endpoint)
    slot = client.open([1, 2, 3])
    with pytest.raises(LatentdError, match="illegal memory access") as fault:
        slot.step(token=66)
    assert fault.value.code == "device_fault"
    assert manager.process.wait(60) == 70
    client.close()


def test_the_daemon_takes_all_files_that_it_may_open() -> None:
    from latentd.preflight import raise_file_limit

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("reaction", ["raise KeyError", "return FakeEngine()"])
def test_sigterm_while_loading_ends_cleanly_whatever_it_interrupts(
    tmp_path: Path, reaction: str
) -> None:
    script = SERVE.replace("\ndaemon =", INTERRUPTED.format(reaction=reaction).rstrip("\n"))
    with Manager(tmp_path, script) as manager:
        manager.wait_for("STATUS=loading")
        manager.process.terminate()
        manager.wait_for("STOPPING=1")
        assert manager.process.wait(60) == 0


def test_a_server_begins_with_what_a_reload_has_changed_while_loading(tmp_path: Path) -> None:
    script = SERVE.replace("\ndaemon =", RELOADED).replace("LifeOptions, No", "lambda: fresh, No")
    command = [sys.executable, "-c", script, f"ipc://{tmp_path}/latentd.sock"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "7.0 54321\n"


READ_AGAIN = """
from latentd.endpoint import EndpointError

waiting = LifeOptions(1.0, waiting=("max_slots", "name"))
outcomes = iter([EndpointError("it is nowhere"), waiting, ValueError("bad"), LifeOptions(1.0)])

def read_again():
    outcome = next(outcomes)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome

daemon ="""


def test_what_has_come_of_a_reload_is_told_until_the_next_one(tmp_path: Path) -> None:
    script = SERVE.replace("\ndaemon =", READ_AGAIN).replace("LifeOptions, No", "read_again, No")
    with Manager(tmp_path, script) as manager:
        manager.wait_for("READY=1")
        with Control(manager.endpoint.replace(".sock", ".ctl")) as control:

            def has_figures(failed: int, waiting: int) -> bool:
                server = control.stats()["server"]
                return (server["reload_failed"], server["restart_needed"]) == (failed, waiting)

            for note, failed, waiting in (
                ("; reload failed: it is nowhere", 1, 0),
                ("; a restart is needed for max_slots, name", 0, 2),
                ("; reload failed: bad", 1, 2),
                ("", 0, 0),
            ):
                manager.process.send_signal(signal.SIGHUP)
                *begun, ended = manager.wait_for("READY=1")
                assert [text[:11] for text in begun if text != "WATCHDOG=1"] == ["RELOADING=1"]
                assert ended == f"READY=1\nSTATUS=serving fake{note}"
                wait_until(partial(has_figures, failed, waiting))
        manager.process.terminate()
        assert manager.process.wait(60) == 0


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError("of the test")])
def test_saving_that_fails_for_whatever_reason_is_exit_code_74(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:  # fmt: skip
    from latentd import serve, snapshot

    def fail(*args: object) -> str:
        raise error

    monkeypatch.setattr(snapshot, "save", fail)
    life = LifeOptions(save=tmp_path / "saved")
    daemon = serve.Daemon(life, lambda: life, Notifier({}))
    server: Any = SimpleNamespace(save_to=None, sessions=None)
    assert daemon._save(None, server) == 74  # type: ignore[arg-type]
    assert f"snapshot {tmp_path / 'saved'}: nothing is saved" in caplog.text
    assert type(error).__name__ in caplog.text
