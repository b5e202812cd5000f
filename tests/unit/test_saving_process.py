"""Save and restore by real processes: signals, the drain command, exit codes, refused snapshots."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gates import wait_until
from latentd.commands.child import Child
from latentd.snapshot_files import MANIFEST, PAGES
from latentd_client import Client, Control, Sampling
from processes import environment, latentd

if TYPE_CHECKING:
    from pathlib import Path

    from latentd_client import Step

pytest.importorskip("torch")

START_S = 120.0
PROMPT = [n % 251 for n in range(150)]
HOT = Sampling(temperature=1.0, seed=5)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sockets, log and snapshot are; short enough for a socket."""
    return tmp_path_factory.mktemp("s")


def start(folder: Path, tiny_dir: Path, *flags: str) -> Child:
    """A daemon that restores and saves at `folder`/saved."""
    model = ("--weights", "random", "--config", str(tiny_dir), "--device", "cpu", "--name", "tiny")
    sizes = ("--max-slots", "2", "--max-ctx", "512", "--drain-s", "1")
    child = Child(folder, (*model, *sizes, *flags))
    child.wait_ready(START_S, lambda status: None)
    return child


def bits(step: Step) -> bytes:
    """The bytes of a step's logits."""
    assert step.logits is not None
    return step.logits.tobytes()


def test_sigterm_saves_and_the_next_start_goes_on_with_the_same_bits(
    folder: Path, tiny_dir: Path
) -> None:
    saved = folder / "saved"
    flags = ("--save", str(saved), "--restore", str(saved))
    with start(folder, tiny_dir, *flags) as child:
        assert "nothing to restore" in child.log.read_text()
        client = Client(child.endpoint, connect_timeout_s=10)
        slot = client.open(PROMPT, sampling=HOT)
        tokens = [slot.token, *(slot.step().token for _ in range(5))]
        assert child.stop() == 0
        assert f"saved 1 slots of 1 sessions, 0.4 MiB of pages at {saved}" in child.log.read_text()
    assert (saved / MANIFEST).is_file()
    with start(folder, tiny_dir, *flags) as child:
        assert "restored 1 slots of 1 sessions" in child.log.read_text()
        assert not saved.exists()
        logits = []
        for _ in range(5):
            step = slot.step(logits=True)
            logits.append(bits(step))
            tokens.append(step.token)
        with client.open(PROMPT, sampling=HOT) as fresh:
            again = [fresh.token, *(fresh.step().token for _ in range(5))]
            for expected in logits:
                step = fresh.step(logits=True)
                assert bits(step) == expected
                again.append(step.token)
        assert again == tokens
        client.close()
        assert child.stop() == 0
    assert (saved / MANIFEST).is_file()


def test_the_drain_command_saves_and_a_torn_snapshot_is_not_served(
    folder: Path, tiny_dir: Path
) -> None:
    saved = folder / "saved"
    with start(folder, tiny_dir) as child:
        client = Client(child.endpoint)
        client.open(PROMPT)
        done = latentd("drain", "--save", str(saved), "--endpoint", child.endpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"saved at {saved}" in done.stdout
        assert child.process.wait(60) == 0
        client.close()
    content = (saved / PAGES).read_bytes()
    (saved / PAGES).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    flags = ("--weights", "random", "--config", str(tiny_dir), "--device", "cpu")
    sizes = ("--max-slots", "2", "--max-ctx", "512", "--endpoint", f"ipc://{folder}/other")
    done = latentd("serve", *flags, *sizes, "--restore", str(saved), "--log-level", "error")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert f"snapshot {saved} is torn" in done.stderr
    assert (saved / MANIFEST).is_file()


def test_a_daemon_that_cannot_save_leaves_with_exit_code_74(folder: Path, tiny_dir: Path) -> None:
    saved = folder / "saved"
    with start(folder, tiny_dir) as child:
        limit = 64 << 10  # less than a page, more than the log
        resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        client = Client(child.endpoint)
        client.open(PROMPT)
        done = latentd("drain", "--save", str(saved), "--endpoint", child.endpoint)
        assert done.returncode == 1
        assert "nothing was saved" in done.stdout
        assert child.process.wait(60) == 74
        assert f"snapshot {saved}: File too large; nothing is saved" in child.log.read_text()
        client.close()
    assert [path.name for path in folder.iterdir() if "saved" in path.name] == []


def test_a_place_that_cannot_be_is_refused_before_the_start(folder: Path) -> None:
    done = latentd(
        "serve", "--model", "/nonexistent", "--save", str(folder / "a" / "b"),
        "--endpoint", f"ipc://{folder}/s",
    )  # fmt: skip
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "no directory that this process may write to" in done.stderr


SLOW = """
import sys, time
from pathlib import Path
import latentd.serve
from fakes import FakeEngine
from latentd.notify import Notifier
from latentd.options import EngineOptions, LifeOptions, ServerOptions
from latentd.startup import StartupReport

def start_engine(options, report):
    engine = FakeEngine()
    engine.startup = StartupReport(buckets=engine.info.buckets)
    engine.fake.read_pages = read_pages
    return engine

def read_pages(pages):
    print("saving", flush=True)
    time.sleep(60)

latentd.serve.start_engine = start_engine
daemon = latentd.serve.Daemon(LifeOptions(1.0, Path(sys.argv[2])), LifeOptions, Notifier())
sys.exit(daemon.run(EngineOptions(Path("/x")), ServerOptions(endpoint=sys.argv[1])))
"""


@pytest.mark.parametrize("how", ["signal", "drain"])
def test_the_second_signal_ends_the_saving_and_leaves_no_part_of_it(folder: Path, how: str) -> None:
    command = [sys.executable, "-c", SLOW, f"ipc://{folder}/d", str(folder / "saved")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        wait_until(lambda: (folder / "d").exists() or process.poll() is not None)
        client = Client(f"ipc://{folder}/d")
        client.open(PROMPT)
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            with Control(f"ipc://{folder}/d.ctl") as control:
                control.drain(save=folder / "saved")
        assert process.stdout is not None
        assert process.stdout.readline() == b"saving\n"
        if how == "drain":
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 74
        client.close()
    assert [path.name for path in folder.iterdir() if "saved" in path.name] == []
