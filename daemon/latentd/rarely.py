"""Warnings that somebody outside can cause at will: each kind is logged once a minute at most."""

from __future__ import annotations

import logging
import time
from typing import Final

WARN_S: Final = 60.0

log = logging.getLogger(__name__)


class Rarely:
    """One kind of warning."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def warn(self, text: str, *values: object) -> None:
        """Log it, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + WARN_S
            log.warning(text, *values)
