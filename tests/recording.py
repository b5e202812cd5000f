"""A library that only notes what it is asked to launch, for CPU tests of the launch modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Recorder:
    """A library of one architecture; `launches` holds what was asked of it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.sm_count, self.max_smem = 132, 232448
        self.launches: list[SimpleNamespace] = []

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, args: list[Any], **rest: Any
    ) -> None:
        self.launches.append(SimpleNamespace(name=name, grid=grid, args=args, **rest))

    def names(self) -> list[str]:
        """Names of the launches since the last call."""
        found = [launch.name for launch in self.launches]
        self.launches.clear()
        return found
