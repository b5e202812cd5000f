"""Lets clients that step in turn share a replay: a short wait for those who were just answered.

Without it two clients never meet: each finds the other's step running, and both get half the rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.runs import StepRun, VerifyRun

if TYPE_CHECKING:
    from latentd.engine_protocol import EngineProtocol
    from latentd.records import SlotRecord
    from latentd.work import Work

SHARE: Final = 0.15
"""The longest wait, as a part of the last step's time: what a client loses by waiting in vain."""
MAX_WAIT_S: Final = 500e-6
"""And in seconds: a client that polls for its reply has asked again by then."""


class Gather:
    """Whose next step a launch may wait for. The wait ends when all have asked; who does not ask in
    time is not waited for again. `is_on`: only a loop that may poll waits; asleep, it is late."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.until = 0.0
        """When the wait ends, on the clock that `answered` was given."""
        self._records: list[SlotRecord] = []

    def launched(self, work: Work) -> None:
        """Note the steps that run now."""
        self._records = [
            run.record for run in work.runs.values() if isinstance(run, StepRun | VerifyRun)
        ]

    def answered(self, started: float, now: float) -> None:
        """Their replies are out; the launch was at `started`."""
        self.until = now + min(MAX_WAIT_S, SHARE * (now - started))

    @property
    def has_steps(self) -> bool:
        """Whether there are steps that will be waited for once they are answered."""
        return self.is_on and bool(self._records)

    def waits(self, engine: EngineProtocol, now: float) -> bool:
        """Whether to wait for more rows: a slot that was answered last has not asked again and
        still can, and the device has work meanwhile, or nobody else has."""
        return self.is_on and now < self.until and self._lacks() and engine.may_wait

    def _lacks(self) -> bool:
        records = self._records
        while records and (records[-1].running is not None or records[-1].closed_at is not None):
            records.pop()
        return bool(records)
