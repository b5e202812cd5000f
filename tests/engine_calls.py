"""Plain operations on an engine over the fake backend, each run to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from latentd.operations import OpenDone, SamplingParams, StepDone
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine
    from latentd.operations import Event, OpenRequest, SlotState

GREEDY = SamplingParams()


def run_all(engine: Engine) -> list[Event]:
    """Run until nothing is left to do; pages and slots agree after each run."""
    events = []
    while engine.has_work:
        events += engine.run()
        engine.slots.check()
    return events


def open_slot(engine: Engine, prompt: list[int]) -> OpenRequest:
    """Open a slot and run its prompt."""
    request = engine.admit_open(prompt, GREEDY, False)
    assert isinstance(run_all(engine)[-1], OpenDone)
    return request


def step(
    engine: Engine, slot: OpenRequest | SlotState, pos: int, token: int | None = None
) -> StepDone:
    """Append one token."""
    engine.admit_step(slot.slot_id, slot.epoch, pos, token, None, False)
    (done,) = run_all(engine)
    assert isinstance(done, StepDone)
    return done


def refused(code: str, call: Callable[[], object]) -> RequestRejected:
    """The refusal of a call, which must have this code."""
    with pytest.raises(RequestRejected) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value
