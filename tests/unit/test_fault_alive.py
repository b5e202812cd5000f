"""Faults that a daemon survives, in front of a client that works on beside them bit by bit."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from beside import PROMPT, Beside
from fault_lab import FaultClient, Lab
from gates import wait_until
from latentd_client import Client, Control
from serving import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch")

LEASE_S, GRACE_S = 2.0, 1.0
FLAGS = (
    "--device", "cpu", "--max-slots", "8", "--max-ctx", "4096", "--name", "tiny",
    "--lease-s", str(LEASE_S), "--grace-s", str(GRACE_S),
)  # fmt: skip
YEARS_S = 10 * 31_556_952


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a")


@pytest.fixture(scope="module")
def lab(folder: Path, tiny_dir: Path) -> Iterator[Lab]:
    """A daemon that the tests share; its clock can be moved where there is a compiler."""
    wrapper: tuple[str, ...] = ()
    (folder / "jump").write_bytes(bytes(8))
    if (compiler := shutil.which("cc")) is not None:
        source, library = Path(__file__).parents[1] / "clock_jump.c", folder / "clock_jump.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        wrapper = ("env", f"LD_PRELOAD={library}", f"CLOCK_JUMP={folder / 'jump'}")
    model = ("--weights", "random", "--config", str(tiny_dir))
    with Lab(folder, (*model, *FLAGS), wrapper) as lab:
        yield lab
        assert lab.child.process.poll() is None
        assert lab.child.stop() == 0


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process is stopped within."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_reloaded(lab: Lab, times: int) -> bool:
    return lab.log.count("reloaded") == times


def test_a_clock_that_jumps_by_years_changes_nothing(lab: Lab, folder: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here: the clock of the daemon cannot be moved")
    with Client(lab.child.endpoint) as client, client.open(PROMPT) as idle:
        with Beside(lab.child.endpoint):
            stream = client.open(PROMPT).stream(100, credit=4)
            for number, seconds in enumerate((YEARS_S, -YEARS_S, 0), 1):
                with (folder / "jump").open("r+b") as file:
                    file.write(seconds.to_bytes(8, "little", signed=True))
                until = time.monotonic() + LEASE_S / 2
                while time.monotonic() < until:
                    next(stream)
                    time.sleep(0.05)
                lab.child.process.send_signal(signal.SIGHUP)
                wait_until(partial(is_reloaded, lab, number))
        assert idle.step().context_len == len(PROMPT) + 1
    years = [int(line[:4]) for line in lab.log.splitlines() if "reloaded" in line]
    assert [year - years[2] for year in years] == [10, -10, 0]


def test_a_stopped_daemon_goes_on_with_its_sessions_however_long_it_was_stopped(lab: Lab) -> None:
    """Also with those of clients that were stopped with it, and do not renew their leases before
    it looks at them."""
    with Client(lab.child.endpoint) as idle, Peer(lab.child.endpoint) as silent:
        slot, seat = idle.open(PROMPT), silent.hello().open()
        with Beside(lab.child.endpoint), stopped(lab.child.process.pid):
            time.sleep(LEASE_S + GRACE_S + 0.5)
        time.sleep(LEASE_S / 2)
        stepped = silent.ask("step", slot=seat["slot"], epoch=seat["epoch"], pos=3)
        assert (stepped["status"], stepped.get("context_len")) == ("ok", 4)
        assert slot.step().context_len == len(PROMPT) + 1


def test_a_client_that_is_stopped_or_killed_loses_its_slots_and_harms_nobody(lab: Lab) -> None:
    stepping, dying, streaming = clients = [
        FaultClient(kind, lab.child.endpoint) for kind in ("steps", "steps", "stream")
    ]
    try:
        with Beside(lab.child.endpoint), Control(f"ipc://{lab.folder}/latentd.ctl") as control:
            for client in clients:
                client.wait_ready()
                client.begin()
            with stopped(stepping.pid):
                dying.end()
                streaming.end()
                wait_until(lambda: control.stats()["slots_used"] == 1)
            seen = stepping.seen()
    finally:
        for client in clients:
            client.end()
    assert seen["code"] == "connection_lost"
    assert "the session has ended, because the daemon did not hear of it" in seen["text"]


def test_a_peer_that_never_reads_is_not_read_any_more(lab: Lab) -> None:
    with Beside(lab.child.endpoint, least=50), Peer(lab.child.endpoint, receive_queue=1) as deaf:
        before = resident_bytes(lab)
        opened = deaf.hello().open()
        deaf.send("stream", slot=opened["slot"], epoch=opened["epoch"], pos=3, max_steps=2000,
                  credit=1000)  # fmt: skip
        deaf.socket.setsockopt(zmq.SNDTIMEO, 1000)
        with contextlib.suppress(zmq.Again):
            while True:
                deaf.send("ping")
        assert resident_bytes(lab) - before < 64 << 20


def resident_bytes(lab: Lab) -> int:
    pages = Path(f"/proc/{lab.child.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("which", ["latentd.sock", "latentd.ctl"])
def test_garbage_on_the_raw_socket_costs_its_sender_the_connection(lab: Lab, which: str) -> None:
    rng = random.Random(5)
    descriptors = Path(f"/proc/{lab.child.process.pid}/fd")
    with Beside(lab.child.endpoint):
        before = len(list(descriptors.iterdir()))
        for _ in range(300):
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.settimeout(0.5)
                raw.connect(str(lab.folder / which))
                raw.sendall(rng.randbytes(rng.randrange(1, 300)))
        with Client(lab.child.endpoint) as client:
            client.ping()
        wait_until(lambda: len(list(descriptors.iterdir())) <= before)
