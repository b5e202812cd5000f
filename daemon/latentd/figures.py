"""Figures of the daemon: the engine thread takes them down, the control thread tells them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from latentd.runs import StreamRun
from latentd_client import __version__
from latentd_kernels import ARITHMETIC_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine_figures import EngineFigures
    from latentd.histogram import Histogram
    from latentd.operations import ModelInfo
    from latentd.reload import Reload
    from latentd.work import Work
    from latentd_client.protocol import Header

WAIT_S: Final = 0.25
"""How long to wait for fresh figures of a busy engine before the last ones are given."""


class Moment(NamedTuple):
    """All figures at a time of the clock `monotonic`. Only numbers were copied: what takes time,
    such as percentiles, is left to whoever tells them."""

    at_s: float
    engine: EngineFigures
    server: Header
    refused: dict[str, int]
    first_token: Histogram
    info: ModelInfo

    def stats(self) -> Header:
        """Counters and gauges, under `server` those of the serving side."""
        figures = self.engine.stats()
        figures["histograms"]["first_token"] = self.first_token.figures()
        return {
            **figures,
            "refused": self.refused,
            "server": self.server,
            "build": build_info(self.info),
        }


def take_down(work: Work, reload: Reload) -> Moment:
    """The figures of now, on the engine thread."""
    outbox, waiting = work.outbox, work.waiting
    streams = (run for run in work.runs.values() if isinstance(run, StreamRun))
    server = {
        "sessions": len(work.sessions),
        "runs": len(work.runs),
        "parked_streams": len(work.undelivered),
        "waiting": waiting.count,
        "admitted_late": waiting.admitted,
        "lost_streams": sum(run.is_lost for run in streams),
        **outbox.counters,
        **reload.figures(),
    }
    engine, first_token = work.engine.figures(), work.first_token.copy()
    refused, info = dict(outbox.refused), work.engine.info
    return Moment(time.monotonic(), engine, server, refused, first_token, info)


def build_info(info: ModelInfo) -> dict[str, str]:
    """What runs here, in words."""
    return {
        "version": __version__,
        "arithmetic": str(ARITHMETIC_VERSION),
        "model": info.name,
        "fingerprint": info.fingerprint,
        "numerics": info.numerics,
        "dtype": info.dtype,
        "device": info.device,
    }


class Figures:
    """What the engine thread publishes when it is asked to, for the control thread."""

    def __init__(self, ask: Callable[[], None], first: Moment) -> None:
        """`ask` makes the engine thread call `publish` soon."""
        self._ask = ask
        self._moment = first
        self._is_fresh = threading.Event()

    def publish(self, moment: Moment) -> None:
        """New figures, from the engine thread."""
        self._moment = moment
        self._is_fresh.set()

    def stats(self) -> Header:
        """All figures; `age_s` tells how old they are."""
        moment = self._get()
        return {**moment.stats(), "age_s": time.monotonic() - moment.at_s}

    def trace(self, last: int) -> Header:
        """The last launches, and their `age_s`."""
        moment = self._get()
        return {"steps": moment.engine.trace(last), "age_s": time.monotonic() - moment.at_s}

    def _get(self) -> Moment:
        """Fresh figures, or the last ones when the engine thread is long in a step."""
        self._is_fresh.clear()
        self._ask()
        self._is_fresh.wait(WAIT_S)
        return self._moment
