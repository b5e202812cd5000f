"""A daemon under attack, and what it has left of it: attackers in processes of their own, a client
that behaves beside them, and the daemon's figures before and after."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

import attacks
from latentd_client import Control
from latentd_client.protocol import control_endpoint
from process_figures import Figures, figures

if TYPE_CHECKING:
    from victims import Victim

NICE: Final = 10
"""Attackers give way to the daemon and to the client that behaves, as on machines of their own."""
TURN_S: Final = 0.5
"""Of the client that behaves, between two looks whether the attackers are done."""
SETTLE_S: Final = 60.0
"""Longest wait until a daemon has forgotten those who are gone."""


@dataclass(frozen=True)
class Raid:
    """An attack with a clock: how much was sent, the times of the client beside it in us, and the
    share of a processor that an attacker took."""

    name: str
    count: int
    times: list[float]
    cpu_share: float

    @property
    def p99_us(self) -> float:
        """What the slowest hundredth of the client's steps took at least."""
        return float(np.percentile(self.times, 99))

    def __str__(self) -> str:
        p50, p99, worst = np.percentile(self.times, (50, 99, 100))
        return (
            f"{self.name:15} {self.count:9,d} sent; beside it {len(self.times)} steps: "
            f"p50 {p50:.0f} us, p99 {p99:.0f}, worst {worst:.0f}"
        )


class Siege:
    """`attackers` processes at a daemon, each at most `rate` counts a second."""

    def __init__(self, endpoint: str, attackers: int, rate: float, seed: int) -> None:
        self.endpoint = endpoint
        self._control = control_endpoint(endpoint)
        self._attackers = attackers
        self._rate = rate
        self._seed = seed
        self._pool = multiprocessing.get_context("spawn").Pool(attackers, os.nice, (NICE,))

    def raid(self, name: str, most: int, seconds: float, victim: Victim | None = None) -> Raid:
        """Attack until `most` was sent or the time is over. Raises what the client beside met, and
        AssertionError when an attacker found the daemon silent."""
        socket = self._control if name in attacks.CONTROL else self.endpoint
        self._seed += self._attackers
        jobs = [
            (name, socket, self._seed + i, most // self._attackers, seconds, self._rate)
            for i in range(self._attackers)
        ]  # fmt: skip
        begin = time.monotonic()
        results = self._pool.starmap_async(_attack, jobs, chunksize=1)
        times: list[float] = []
        while victim is not None and not results.ready():
            victim.start(TURN_S)
            times += victim.times()
        done = results.get()
        elapsed_s = time.monotonic() - begin
        cpu_s = sum(cpu_s for _, cpu_s in done) / len(done)
        return Raid(name, sum(count for count, _ in done), times, cpu_s / elapsed_s)

    def burn(self, share: float, seconds: float, victim: Victim) -> Raid:
        """What a client sees beside as many processes that only use that share of a processor."""
        results = self._pool.starmap_async(_burn, [(share, seconds)] * self._attackers, chunksize=1)
        victim.start(seconds)
        times = victim.times()
        results.get()
        return Raid("burn", 0, times, share)

    def settled(self, pid: int, sessions: int) -> Figures:
        """The daemon's figures once those who are gone are forgotten. Raises AssertionError when
        they are not."""
        end = time.monotonic() + SETTLE_S
        with Control(self._control) as control:
            while True:
                stats = control.stats()
                left = {"sessions": control.health()["sessions"], "slots": stats["slots_used"],
                        "runs": stats["server"]["runs"],
                        "parked": stats["server"]["parked_streams"]}  # fmt: skip
                if left == {"sessions": sessions, "slots": sessions, "runs": 0, "parked": 0}:
                    break
                assert time.monotonic() < end, f"of those who are gone there is left: {left}"
                time.sleep(0.2)
        time.sleep(1.0)  # it sees that we are gone too
        return figures(pid)

    def close(self) -> None:
        """End the attackers."""
        self._pool.terminate()
        self._pool.join()


def _attack(
    name: str, endpoint: str, seed: int, most: int, seconds: float, rate: float
) -> tuple[int, float]:
    """In a process of its own: what was sent, and the seconds of processor time."""
    pace = attacks.Pace(most, seconds, rate)
    begin = time.process_time()
    {**attacks.DATA, **attacks.CONTROL}[name](endpoint, random.Random(seed), pace)
    return pace.count, time.process_time() - begin


def _burn(share: float, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        until = time.thread_time() + 0.01 * share
        while time.thread_time() < until:
            pass
        time.sleep(0.01 * max(0.0, 1 - share))
