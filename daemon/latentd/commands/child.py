"""A daemon as a child process: started, waited for like a service manager does, stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd.settings import ConfigError
from latentd_client import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

POLL_S = 0.2
PROGRAM: Final = (sys.executable, "-m", "latentd")
PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that a process gets when its parent has ended."""


def _end_with_parent() -> None:
    """In the child: a parent that is killed takes its daemon along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """`latentd serve` on a socket in `folder`; a context manager that stops it at the end.

    The child's own LATENTD_* variables are left out, so that only `flags` count. Its log goes to
    `folder`/log.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str], program: Sequence[str] = PROGRAM
    ) -> None:
        """`program` is the command line of `latentd`. Another daemon may have been in `folder`."""
        self.endpoint = f"ipc://{folder}/latentd.sock"
        self.log = folder / "log"
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        (folder / "notify").unlink(missing_ok=True)
        self._manager.bind(str(folder / "notify"))
        self._manager.settimeout(POLL_S)
        environ = {key: text for key, text in os.environ.items() if not key.startswith("LATENTD_")}
        environ["NOTIFY_SOCKET"] = str(folder / "notify")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, "serve", "--endpoint", self.endpoint, *flags],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C reaches the parent, which stops the child
                preexec_fn=_end_with_parent,
            )  # fmt: skip

    def wait_ready(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """Wait for READY=1, reporting each STATUS. Raises ConfigError with the child's last line
        when it ends, ConnectionLost when it takes longer."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                fields = dict(
                    line.split("=", 1) for line in self._manager.recv(65536).decode().splitlines()
                )
            except TimeoutError:
                if self.process.poll() is not None:
                    raise ConfigError(f"the daemon did not start: {self.last_line()}") from None
                continue
            if "STATUS" in fields:
                report(fields["STATUS"])
            if "READY" in fields:
                return
        raise ConnectionLost(f"the daemon was not ready within {timeout_s:g} s; see {self.log}")

    def last_line(self) -> str:
        """The last line of the child's log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it wrote no log")

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask it to drain and end; kill it when it does not. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._manager.close()
