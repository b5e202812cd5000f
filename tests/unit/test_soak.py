"""A short `make soak`, and what a soak does not miss."""

import subprocess
import sys
from pathlib import Path

import pytest

from process_figures import Figures
from processes import environment
from soak_daemon import GROWTH_KB, Look, grows

SOAK = Path(__file__).parents[1] / "soak_daemon.py"


def test_a_daemon_keeps_its_memory_and_its_rest_under_clients() -> None:
    command = [sys.executable, str(SOAK), "--seconds", "6", "--idle", "3"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "misses: none" in done.stdout


@pytest.mark.parametrize(
    ("last", "misses"),
    [
        (Figures(1000, 5, 3, 0.0), 0),
        (Figures(1000 + int(5 * GROWTH_KB), 5, 3, 0.0), 1),
        (Figures(1000, 6, 3, 0.0), 1),
        (Figures(1000, 5, 4, 0.0), 1),
    ],
    ids=["nothing", "memory", "a descriptor", "a thread"],
)
def test_what_grows_is_named(last: Figures, misses: int) -> None:
    first = Figures(1000, 5, 3, 0.0)
    looks = [Look(0, first), Look(200_000, first), Look(400_000, last)]
    assert len(grows(looks)) == misses
