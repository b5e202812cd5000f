"""A real daemon whose faults a test switches on, its clients, and what they saw of a fault."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import fault_clients
from latentd.commands.child import Child
from latentd_client import Client
from processes import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START_S: Final = 120.0
EXIT_S: Final = 30.0
AMID_S: Final = 0.2
"""How long clients work until their daemon fails."""
HERE: Final = Path(__file__).parent


class Lab:
    """One daemon after another, in `folder`; a context manager."""

    def __init__(self, folder: Path, flags: Sequence[str], wrapper: Sequence[str] = ()) -> None:
        """`flags` are those of `serve`, `wrapper` a command line that runs another one."""
        self.folder = folder
        self._flags = flags
        self._switches = folder / "switches"
        self._switches.mkdir()
        program = (sys.executable, str(HERE / "faulty.py"), str(self._switches))
        self._program = (*wrapper, *program)
        self.child = self.start()

    def start(self) -> Child:
        """A daemon without faults that is ready; the one before has ended."""
        for switch in self._switches.iterdir():
            switch.unlink()
        self.child = Child(self.folder, self._flags, self._program)
        self.child.wait_ready(START_S, lambda status: None)
        return self.child

    def switch(self, name: str, text: str) -> None:
        """Turn a fault on, at once and whole."""
        (self.folder / name).write_text(text)
        (self.folder / name).rename(self._switches / name)

    def wait(self) -> int:
        """The exit code of the daemon, when it has ended by itself."""
        code = self.child.process.wait(EXIT_S)
        self.child.__exit__(None, None, None)
        return code

    @property
    def log(self) -> str:
        """What the last daemon has written."""
        return self.child.log.read_text()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.process.kill()
        self.child.__exit__(None, None, None)


class FaultClient:
    """A process of fault_clients.py."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_clients.py"), kind, endpoint],
            env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def seen(self) -> dict[str, Any]:
        """What it says at its end; `state` is the health that it saw, if it looked."""
        output, _ = self._process.communicate(timeout=START_S)
        *states, last = output.splitlines()
        return {**json.loads(last), "state": states[0] if states else None}

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Seen:
    """What came of a fault: the exit code, how long it took to come, and by kind of client the code
    and the text that ended it. `state` is the health that was seen at last, `log` what the daemon
    wrote, `paths_left` its sockets that are still there."""

    exit_code: int
    took_s: float
    codes: dict[str, str | None]
    texts: dict[str, str]
    state: str | None
    log: str
    paths_left: list[str]


def seen_amid_work(lab: Lab, fault: Callable[[], object]) -> Seen:
    """Let clients of every kind work, and then the daemon fail, and start it again.

    Asserts that what they were given by then, and by the next daemon, is what nobody disturbed
    would have been given."""
    clients = {kind: FaultClient(kind, lab.child.endpoint) for kind in fault_clients.KINDS}
    try:
        for client in clients.values():
            client.wait_ready()
        for client in clients.values():
            client.begin()
        time.sleep(AMID_S)
        start = time.monotonic()
        fault()
        exit_code, took_s = lab.wait(), time.monotonic() - start
        log, paths = lab.log, ("latentd.ctl", "latentd.sock")
        paths_left = [name for name in paths if (lab.folder / name).exists()]
        seen = {kind: one.seen() for kind, one in clients.items() if kind != "survivor"}
        lab.start()
        survived = clients["survivor"].seen()
    finally:
        for client in clients.values():
            client.end()
    assert survived["code"] is None, survived["text"]
    check_tokens(lab.child.endpoint, [one["tokens"] for one in (*seen.values(), survived)])
    return Seen(
        exit_code, took_s, {kind: one["code"] for kind, one in seen.items()},
        {kind: one["text"] for kind, one in seen.items()}, seen["idle"]["state"], log, paths_left,
    )  # fmt: skip


def check_tokens(endpoint: str, texts: Sequence[Sequence[int]]) -> None:
    """Assert that each of the texts is the beginning of what a daemon gives to an undisturbed
    client, and that more than one token was given to somebody."""
    longest = max(map(len, texts))
    assert longest > 1
    with Client(endpoint) as client, client.open(fault_clients.PROMPT) as slot:
        tokens = [slot.token, *(step.token for step in slot.stream(longest - 1))]
    for text in texts:
        assert list(text) == tokens[: len(text)]
