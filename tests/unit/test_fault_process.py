"""Faults that end a daemon, or keep it from starting: what its clients see, the exit code, and what
the next one knows. `seen_amid_work` looks at the tokens of all clients, before and after."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from beside import PROMPT, Beside
from fault_lab import Lab, seen_amid_work
from latentd_client import Client, RequestRejected
from processes import latentd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., Lab]

pytest.importorskip("torch")

FLAGS = ("--device", "cpu", "--max-slots", "8", "--max-ctx", "4096", "--name", "tiny")
ENDED = {"steps", "asyncio", "stream", "idle"}
"""The kinds of clients that a fault ends."""
TMPFS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTED = 'mount -t tmpfs -o size="$1" none "$0" && shift && exec "$@"'
PAGE_BYTES = 2 * 64 * 576 * 2


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> tuple[str, ...]:
    return ("--weights", "random", "--config", str(tiny_dir), *FLAGS)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, model: tuple[str, ...]) -> Iterator[Lab]:
    """A daemon that each fault leaves to the next one, started again."""
    with Lab(tmp_path_factory.mktemp("f"), model) as lab:
        yield lab


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, model: tuple[str, ...]) -> Iterator[Start]:
    """Starts a daemon of the test's own, in a folder, with more flags or within another program."""
    labs: list[Lab] = []

    def start(folder: Path, *flags: str, wrapper: tuple[str, ...] = ()) -> Lab:
        labs.append(Lab(folder, (*model, *flags), wrapper))
        return labs[-1]

    yield start
    for lab in labs:
        lab.__exit__()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")


def test_a_device_fault_is_told_to_every_client_and_ends_the_daemon_with_70(lab: Lab) -> None:
    text = "cuLaunchKernelEx failed with 700: CUDA_ERROR_ILLEGAL_ADDRESS"
    seen = seen_amid_work(lab, lambda: lab.switch("device-fault", text))
    assert seen.codes == dict.fromkeys(ENDED, "device_fault")
    told = f"the device failed, the daemon ends and will be restarted: {text}"
    assert seen.texts == dict.fromkeys(ENDED, told)
    assert (seen.state, seen.exit_code, seen.paths_left) == ("fault", 70, [])
    assert f"device fault, leaving with exit code 70: {text}" in seen.log


@pytest.mark.parametrize(
    ("switch", "error"), [("exception", "ZeroDivisionError"), ("out-of-memory", "MemoryError")]
)
def test_an_exception_in_the_step_is_told_to_every_client_and_ends_the_daemon_with_1(
    lab: Lab, switch: str, error: str
) -> None:
    seen = seen_amid_work(lab, lambda: lab.switch(switch, "of the test"))
    assert set(seen.codes.values()) <= {"internal", "draining"}  # whether its request was there
    assert "internal" in seen.codes.values()
    assert seen.codes["idle"] == "draining"
    told = "the daemon has failed, ends and will be restarted; its log says why"
    assert seen.texts == dict.fromkeys(ENDED, told)
    assert (seen.state, seen.exit_code, seen.paths_left) == ("fault", 1, [])
    assert "failed, leaving with exit code 1" in seen.log
    assert f"{error}: of the test" in seen.log
    assert "in faulty_wait" in seen.log


def test_a_killed_daemon_leaves_paths_that_the_next_one_replaces(lab: Lab) -> None:
    seen = seen_amid_work(lab, lambda: lab.child.process.kill())
    assert seen.codes == dict.fromkeys(ENDED, "connection_lost")
    told = ("broke; the request may have run", "no daemon listens")  # asked before it died, or then
    assert [text for text in seen.texts.values() if not any(part in text for part in told)] == []
    assert (seen.state, seen.exit_code) == (None, -signal.SIGKILL)
    assert seen.paths_left == ["latentd.ctl", "latentd.sock"]
    with Client(lab.child.endpoint) as client:
        assert client.ping() > 0


def test_a_disk_that_is_full_while_saving_is_exit_code_74(start: Start, folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    size = PAGE_BYTES * 2 + 8192  # two pages and their header, and no room for the rest
    wrapper: tuple[str, ...] = (*TMPFS, MOUNTED, str(disk), str(size))
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        wrapper = ()
    lab = start(folder, "--save", str(disk / "saved"), "--drain-s", "0.5", wrapper=wrapper)
    if not wrapper:  # no disk of our own: the writer says that it is full
        lab.switch("disk-full", "1")
    with Client(lab.child.endpoint) as client:
        slot = client.open(PROMPT)
        stream = slot.stream(3900, credit=1)
        next(stream)
        lab.child.process.send_signal(signal.SIGTERM)
        with pytest.raises(RequestRejected, match="draining"):
            list(stream)
        assert lab.wait() == 74
    assert f"snapshot {disk / 'saved'}: No space left on device; nothing is saved" in lab.log
    assert os.listdir(disk) == []


def test_a_log_that_nobody_reads_holds_up_neither_steps_nor_the_end(
    start: Start, folder: Path
) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 8192)
    lab = start(folder, wrapper=("sh", "-c", 'exec "$@" 2> "$0"', str(pipe)))
    with Beside(lab.child.endpoint):
        for _ in range(200):  # a line each, and most of them are lost
            lab.child.process.send_signal(signal.SIGHUP)
            time.sleep(0.005)
    with Client(lab.child.endpoint) as client:
        slot = client.open(PROMPT)
        lab.switch("exception", "of the test")
        with pytest.raises(RequestRejected, match="its log says why"):
            slot.step()
        assert lab.wait() == 1
    os.set_blocking(reader, False)
    assert 4096 <= len(os.read(reader, 1 << 20)) <= 8192
    os.close(reader)


def test_memory_that_is_not_there_at_the_start_is_exit_code_78(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    endpoint = ("--endpoint", f"ipc://{tmp_path}/d", "--log-level", "error")
    done = latentd("serve", *model, *endpoint, "--kv-pages", str(2**31 - 1))
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert f"a pool of {2**31 - 1} pages" in done.stderr
    assert "lower kv_pages" in done.stderr


def test_a_path_of_108_bytes_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    path = f"{tmp_path}/".ljust(108, "x")
    done = latentd("serve", "--model", "/nonexistent", "--endpoint", f"ipc://{path}")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "the path has 108 bytes, a unix socket takes at most 107" in done.stderr
