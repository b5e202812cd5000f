"""Plain operations on an engine over the fake backend, each run to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from latentd.extras import NO_EXTRAS
from latentd.operations import OpenDone, SamplingParams, StepRequest
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine
    from latentd.extras import Extras
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


def admit_step(
    engine: Engine, slot_id: int, epoch: int, pos: int, token: int | None = None,
    sampling: SamplingParams | None = None, logits: bool = False, extras: Extras = NO_EXTRAS,
) -> StepRequest:  # fmt: skip
    """Queue one row; the request is the event of its end."""
    return engine.admit_step(StepRequest(slot_id, epoch, pos, logits, extras), token, sampling)


def step(
    engine: Engine, slot: OpenRequest | SlotState, pos: int, token: int | None = None
) -> StepRequest:
    """Append one token."""
    admit_step(engine, slot.slot_id, slot.epoch, pos, token)
    (done,) = run_all(engine)
    assert isinstance(done, StepRequest)
    return done


def refused(code: str, call: Callable[[], object]) -> RequestRejected:
    """The refusal of a call, which must have this code."""
    with pytest.raises(RequestRejected) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value
