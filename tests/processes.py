"""Processes of their own: the command lines, and what they are given."""

from __future__ import annotations

import os
import subprocess
import sys


def environment(**variables: str) -> dict[str, str]:
    """This process's for another one: with its path and none of the caller's settings."""
    ours = {key: text for key, text in os.environ.items() if not key.startswith("LATENTD_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def latentd(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `latentd` with this interpreter's path and none of the caller's settings."""
    return _module("latentd", *args)


def latentd_openai(*args: str) -> subprocess.CompletedProcess[str]:
    """The same of `latentd-openai`."""
    return _module("latentd_openai", *args)


def _module(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", name, *args],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
