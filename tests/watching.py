"""What a busy daemon shows of itself to those who watch it: its screen, and its metrics."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def screen(endpoint: str, folder: Path | None) -> str:
    """What `latentd top` shows, which `folder` gets too (see screens.py); without rich, what
    `latentd status` does."""
    if folder is not None:
        import screens

        return screens.take(endpoint, folder)
    command = ["top", "--once"] if importlib.util.find_spec("rich") else ["status"]
    done = subprocess.run(
        [sys.executable, "-m", "latentd", *command, "--endpoint", endpoint],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def scrape(endpoint: str) -> str:
    """What Prometheus gets, without the buckets of histograms; a note without prometheus-client."""
    if importlib.util.find_spec("prometheus_client") is None:
        return "no metrics: prometheus-client is not installed here"
    command = ["metrics", "--listen", "127.0.0.1:0", "--endpoint", endpoint]
    with subprocess.Popen(
        [sys.executable, "-m", "latentd", *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            with urllib.request.urlopen(url, timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        finally:
            process.terminate()
    return "\n".join(line for line in lines if not line.startswith("#") and "_bucket{" not in line)
