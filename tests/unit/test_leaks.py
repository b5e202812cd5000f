"""Whatever clients do and however they end: free pages and slots return to the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fakes import FakeEngine
from gates import wait_until
from latentd_client import Client
from serving import serving

if TYPE_CHECKING:
    from serving import Running

DYING_CLIENTS = Path(__file__).parents[1] / "dying_clients.py"


def check_empty(engine: FakeEngine) -> None:
    """Nobody has anything, and nothing is missing."""
    pool = engine.slots.pool
    engine.slots.check()
    assert engine.slots.num_used == 0
    assert (pool.num_free, pool.num_waiting) == (pool.num_pages, 0)


def num_records(running: Running) -> int:
    """What the sessions remember of slots and of the calls that made them."""
    sessions = list(running.server._work.sessions)
    return sum(len(session.slots) + len(session.opens) for session in sessions)


def test_500_clients_that_are_killed_leave_no_slot_and_no_page(endpoint: str) -> None:
    engine = FakeEngine(max_slots=256, max_ctx=512)
    with serving(endpoint, engine, lease_s=1.5, grace_s=0.3) as running:
        command = [sys.executable, str(DYING_CLIENTS), endpoint, "500"]
        subprocess.run(command, check=True, timeout=120)
        assert engine.counters.opens == 500
        wait_until(lambda: len(running.server._work.sessions) == 0)
        with Client(endpoint) as client:
            assert client.stats()["slots_used"] == 0
    check_empty(engine)


def test_10000_slots_opened_and_closed_leave_nothing_behind(endpoint: str) -> None:
    engine = FakeEngine(max_slots=4, max_ctx=300, pages=14, cache=True)
    with serving(endpoint, engine, grace_s=0.3) as running, Client(endpoint) as client:
        for number in range(10_000):
            prompt = [number % 5 + 1] * (number % 260)
            client.open(prompt, salt=str(number % 3)).close()
        assert engine.counters.opens == 10_000
        wait_until(lambda: num_records(running) == 0)
    check_empty(engine)
