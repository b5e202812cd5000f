"""A real systemd as pid 1 of a root of its own (systemd/boot.sh), with latentd installed in it.

Every command and its output go to a transcript.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service_manager_root import CannotRun, binds, make_cgroup, remove_cgroup

if TYPE_CHECKING:
    from collections.abc import Callable

HERE: Final = Path(__file__).parent / "systemd"
KINDS: Final = ("mnt", "pid", "cgroup", "ipc", "uts", "net")
UNSHARE: Final = ("unshare", "--fork", "--kill-child", "--pid", "--mount", "--cgroup", "--ipc",
                  "--uts", "--net", "--propagation", "private")  # fmt: skip
ENTER: Final = ("--mount", "--pid", "--cgroup", "--ipc", "--uts", "--net", "--root", "--wd")
NEEDED: Final = ("unshare", "nsenter", "findmnt", "pivot_root", "systemctl", "systemd-sysusers")
BOOT_S: Final = 30.0
PR_SET_PDEATHSIG: Final = 1
CANNOT, REFUSED = 77, 99
"""Exit codes of boot.sh."""


class NotIsolated(Exception):
    """boot.sh has seen something of the outside, and has gone no further."""


def find_obstacle() -> str | None:
    """Why there can be no systemd of our own, as far as can be told without trying."""
    if os.geteuid() != 0:
        return "namespaces with a root of their own need root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"not installed: {', '.join(missing) or 'systemd'}"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Manager:
    """One systemd, from `boot` to `close`. `root` is its root as seen from here."""

    def __init__(self, folder: Path) -> None:
        """`folder` takes what the boot needs, its log and the transcript. Raises CannotRun."""
        self.folder = folder
        self.transcript = folder / "transcript"
        self._began = time.monotonic()
        self._cgroup = make_cgroup()
        self._outer: subprocess.Popen[bytes] | None = None
        self.pid = 0

    @property
    def root(self) -> Path:
        """The root inside; paths below it lead to its files and sockets."""
        return Path(f"/proc/{self.pid}/root")

    def boot(self, prepare: str) -> None:
        """Start it: `prepare` is a shell script that is run in the new root before systemd.
        Raises CannotRun and NotIsolated."""
        mounts, python = binds()
        (self.folder / "binds").write_text("".join(f"{one} {other}\n" for one, other in mounts))
        (self.folder / "prepare").write_text(f"PROGRAM='{python}'\n{prepare}")
        outer = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS)
        with tempfile.NamedTemporaryFile(dir="/tmp", prefix="latentd-outside-") as mark:
            environ = {
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LAB": str(self.folder), "OUTER": outer,
                "MARK": mark.name,
            }  # fmt: skip
            with (self.folder / "boot.log").open("wb") as log:
                self._outer = subprocess.Popen(
                    [*UNSHARE, "sh", str(HERE / "boot.sh")], env=environ, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, preexec_fn=self._enter_cgroup,
                )  # fmt: skip
            self._wait_for_boot()

    def _enter_cgroup(self) -> None:
        """In the child: whoever ends the tests ends systemd too, and its cgroup is its own."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        (self._cgroup / "cgroup.procs").write_text(str(os.getpid()))

    def _wait_for_boot(self) -> None:
        assert self._outer is not None
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            if (code := self._outer.poll()) is not None:
                text = (self.folder / "boot.log").read_text().strip()
                raise (NotIsolated if code == REFUSED else CannotRun)(text.split("\n")[-1])
            with contextlib.suppress(OSError, ValueError):
                self.pid = self.pid or int(children.read_text())
            if self.pid and (self.root / "run/systemd/private").exists():
                return
            time.sleep(0.02)
        raise CannotRun(f"systemd has not come up within {BOOT_S:g} s")

    def run(self, *command: str, expect: int = 0) -> str:
        """Run a command inside, as root; what it printed. Raises AssertionError when it ends with
        another exit code."""
        began_s = time.monotonic() - self._began
        with self.start(*command) as process:
            output, _ = process.communicate(timeout=120)
        took_s = time.monotonic() - self._began - began_s
        code = f", exit code {process.returncode}" if process.returncode else ""
        head = f"[{began_s:6.2f} s, took {took_s:.2f}{code}] $ {shlex.join(command)}"
        self._write(f"{head}\n{output}")
        assert process.returncode == expect, output
        return output

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command inside, as root; a context manager that waits for its end."""
        return subprocess.Popen(
            ["nsenter", "--target", str(self.pid), *ENTER, *command], text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        output = self.run("systemctl", "show", unit, f"--property={','.join(names)}")
        return dict(line.split("=", 1) for line in output.splitlines())

    def peek(self, unit: str, name: str) -> str:
        """A property of a unit, for who looks again and again: not in the transcript."""
        with self.start("systemctl", "show", unit, f"--property={name}", "--value") as process:
            return process.communicate(timeout=120)[0].strip()

    def log(self, unit: str, *matches: str) -> str:
        """What a unit has written, and systemd about it; not in the transcript. `matches` are
        fields of the journal, for example _PID=1."""
        command = ("journalctl", f"--unit={unit}", *matches, "--output=cat", "--no-pager")
        with self.start(*command) as process:
            return process.communicate(timeout=120)[0]

    def note(self, text: str) -> None:
        """Put a remark into the transcript."""
        self._write(f"\n# {text}\n")

    def _write(self, text: str) -> None:
        with self.transcript.open("a") as file:
            file.write(text)

    def close(self) -> None:
        """End all of it."""
        if self._outer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self._outer.pid, signal.SIGKILL)
            self._outer.wait()
        remove_cgroup(self._cgroup)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Look again and again. Raises AssertionError when the time is over."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
