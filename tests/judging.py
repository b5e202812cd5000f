"""A daemon of its own process for those who work at it for long and then say what was wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd.commands.child import Child
from timed_streams import READY_S, source

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_TOLD: Final = 3000
"""Characters of a trace."""


def judged(model: str, flags: list[str], judge: Callable[[Child], list[str]]) -> list[str]:
    """What `judge` has found wrong with a daemon of one of MODELS that has these flags, and what
    the daemon's end and its log tell."""
    with tempfile.TemporaryDirectory(prefix="latentd-") as name:
        folder = Path(name)
        with Child(folder, [*source(model, folder), *flags]) as daemon:
            daemon.wait_ready(READY_S, lambda status: None)
            misses = judge(daemon)
            if (code := daemon.stop()) != 0:
                misses.append(f"exit code {code}")
        log = daemon.log.read_text(errors="replace")
    if "Traceback" in log:
        print(log[log.index("Traceback") :][:MOST_TOLD])
        misses.append("an exception in the daemon's log")
    return misses
