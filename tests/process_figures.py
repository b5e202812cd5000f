"""What a process holds and uses, as the system tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figures:
    """Resident memory, open descriptors, threads, and seconds of processor time so far."""

    rss_kb: int
    descriptors: int
    threads: int
    cpu_s: float

    def __str__(self) -> str:
        rss_mb = self.rss_kb / 1024
        return f"{rss_mb:.1f} MB, {self.descriptors} descriptors, {self.threads} threads"


def grown(before: Figures, after: Figures, growth_kb: float) -> list[str]:
    """What a process holds more of: memory only beyond `growth_kb`."""
    misses = []
    if after.rss_kb - before.rss_kb > growth_kb:
        misses.append(f"{after.rss_kb - before.rss_kb} KB more")
    for name in ("descriptors", "threads"):
        if (more := getattr(after, name) - getattr(before, name)) > 0:
            misses.append(f"{more} more {name}")
    return misses


def figures(pid: int) -> Figures:
    """Of a process now. Raises OSError when there is none."""
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Figures(
        rss_kb=int(status["VmRSS"].split()[0]),
        descriptors=len(os.listdir(folder / "fd")),
        threads=int(status["Threads"]),
        cpu_s=sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
    )
