"""What a reload of the settings has come to, for those who look: the status line and figures."""

from __future__ import annotations

from typing import Final, NamedTuple

from latentd.access import AccessError
from latentd.endpoint import EndpointError
from latentd.snapshot_files import SnapshotError

UNUSABLE: Final = (ValueError, AccessError, EndpointError, SnapshotError)
"""Errors of settings that are read again and cannot be used."""


class Reload(NamedTuple):
    """The last reload: why it failed, if it did, and which settings have other values in their
    sources than in this process, because they need a restart."""

    failure: str = ""
    waiting: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What the status line has behind what the daemon does."""
        if self.failure:
            return f"; reload failed: {self.failure}"
        return f"; a restart is needed for {', '.join(self.waiting)}" if self.waiting else ""

    def figures(self) -> dict[str, int]:
        """Gauges of `stats`: not 0 where the settings in the sources are not in effect."""
        return {"reload_failed": int(bool(self.failure)), "restart_needed": len(self.waiting)}
