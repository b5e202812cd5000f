"""Attention for clients on the cpu backend has the bits of the daemon's own steps. tests/gpu has it
for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import attend_promises
import scenarios
from attend_promises import EngineService, random_rows, run_all, send_attention
from latentd.demo import model_dir
from latentd.operations import AttendDone, SamplingParams
from latentd.selftest_probe import slab_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]

PROMPT = scenarios.draw_tokens(61, 3)
FORCED = scenarios.draw_tokens(9, 4)


@pytest.mark.parametrize(
    "changes", [{}, {"numerics": "landed"}, {"dtype": "float32"}], ids=["f32", "landed", "float32"]
)
def test_a_model_run_elsewhere_has_the_bits_of_the_daemons_own_step(
    start: Start, changes: dict[str, str]
) -> None:
    service = EngineService(start(**changes))
    own = send_attention(start(prefill_chunk=4, **changes), service)
    assert scenarios.decode(own, PROMPT, FORCED) == scenarios.decode(
        start(**changes), PROMPT, FORCED
    )
    assert not slab_of(own).any(), "the model that runs elsewhere has a cache of its own"
    service.engine.slots.check()


def test_rows_of_several_slots_have_the_bits_of_the_daemons_own_steps(start: Start) -> None:
    plain, own = start(), send_attention(start(prefill_chunk=4), EngineService(start()))
    prompts = [scenarios.draw_tokens(length, length) for length in (5, 63, 64, 130)]
    found = []
    for engine in (plain, own):
        slots = [scenarios.open_slot(engine, prompt) for prompt in prompts]
        found.append([scenarios.step(engine, [(slot, None) for slot in slots]) for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_steps_recorded_in_one_engine_have_the_same_bits_in_another(
    start: Start, numerics: str
) -> None:
    attend_promises.steps_recorded_in_one_engine_have_the_same_bits_in_another(
        start(numerics=numerics), start(numerics=numerics), [5, 63, 64, 130], 2
    )


def test_a_prompt_in_runs_has_the_bits_of_its_chunks(start: Start) -> None:
    attend_promises.a_prompt_in_runs_has_the_bits_of_its_chunks(
        start(prefill_chunk=4), start(), 131
    )


def test_the_order_of_pages_does_not_change_a_bit(start: Start) -> None:
    found = []
    for mix in (scenarios.reverse, lambda engine: scenarios.scramble(engine, 5)):
        service = start()
        mix(service)
        own = send_attention(start(prefill_chunk=4), EngineService(service))
        found.append(scenarios.decode(own, PROMPT, FORCED))
    assert found[0] == found[1]


def test_a_daemon_of_attention_alone_has_the_bits_of_one_of_the_whole_model(start: Start) -> None:
    usual = {"model_dir": model_dir(), "weights": "checkpoint"}
    full, alone = start(**usual), start(attend_only=True, selftest=True, **usual)
    assert alone.startup.weight_bytes < full.startup.weight_bytes / 4
    attend_promises.daemons_of_both_kinds_have_the_same_bits(full, alone, 3)


def test_a_forked_slot_goes_on_with_the_same_bits_and_leaves_its_source_alone(start: Start) -> None:
    engine = start()
    source = _attended(engine, 70)
    fork = scenarios.fork(engine, scenarios.Tracked(source, 70, None, b""))
    twin = _attended(engine, 70)
    for seat in (fork.request, source):
        assert np.array_equal(_attend_all(engine, seat, 70, 9), _attend_all(engine, twin, 70, 9))
        scenarios.take_back(engine, scenarios.Tracked(twin, 71, None, b""), 70)


def test_a_native_step_goes_on_behind_attended_positions(start: Start) -> None:
    service = EngineService(start())
    own, plain = send_attention(start(prefill_chunk=4), service), start()
    tracked = [scenarios.open_slot(engine, PROMPT) for engine in (own, plain)]
    slot_id, epoch = service.seats[tracked[0].request.slot_id]
    seat = scenarios.Tracked(scenarios.Seat(slot_id, epoch), len(PROMPT), None, b"")
    assert scenarios.step(service.engine, [(seat, 7)]) == scenarios.step(plain, [(tracked[1], 7)])


def _attended(engine: Engine, length: int) -> scenarios.Seat:
    """A slot of which a client has attended `length` positions."""
    request = engine.admit_open([], SamplingParams(seed=1), False)
    run_all(engine)
    seat = scenarios.Seat(request.slot_id, request.epoch)
    for pos in range(length):
        _attend_all(engine, seat, pos, pos)
    return seat


def _attend_all(engine: Engine, seat: object, pos: int, seed: int) -> np.ndarray:
    """One position in all layers; the results of the last."""
    q, latent = random_rows(engine, 1, seed)
    for layer in range(engine.info.layers):
        rows = [(seat.slot_id, seat.epoch, pos)]  # type: ignore[attr-defined]
        engine.admit_attend(layer, rows, q, latent)
        (done,) = run_all(engine)
    assert isinstance(done, AttendDone)
    assert done.lengths == [pos + 1]
    return done.o
