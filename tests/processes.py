"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def latentd(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `latentd` with this interpreter's path and none of the caller's settings."""
    return _module("latentd", *args)


def latentd_openai(*args: str) -> subprocess.CompletedProcess[str]:
    """The same of `latentd-openai`."""
    return _module("latentd_openai", *args)


def _module(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {key: text for key, text in os.environ.items() if not key.startswith("LATENTD_")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", name, *args],
        env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
