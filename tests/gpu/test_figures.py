"""What a device leaves in the figures: replays of graphs, and clocks that agree with the host's."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import pytest

import scenarios
from attend_promises import random_rows
from latentd import tracing
from latentd.demo import model_dir
from latentd_client.fields import MAX_TRACED

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu
SLACK_US = 20.0
"""Of two clocks that drift: a trace of a second, and 20 in a million."""


def test_every_step_and_attention_replays_a_graph_and_no_chunk_does(start: Start) -> None:
    engine = start(device="cuda", max_slots=8)
    engine.reset_stats()
    slots = [scenarios.open_slot(engine, [1 + n] * 70) for n in range(5)]
    scenarios.step(engine, [(slot, 3) for slot in slots])
    scenarios.stream(engine, slots[0], 40)
    empty = engine.admit_open([], scenarios.GREEDY, False)
    scenarios.run_all(engine)
    for layer in range(engine.info.layers):
        rows = [(empty.slot_id, empty.epoch, 0)]
        engine.admit_attend(layer, rows, *random_rows(engine, 1, layer))
        scenarios.run_all(engine)
    stats = engine.stats()
    assert (stats["steps"], stats["attends"]) == (41, engine.info.layers)
    assert stats["chunks"] >= 5
    assert stats["graph_replays"] == 41 + engine.info.layers
    assert stats["graph_fallbacks"] == 0


def test_launches_without_their_graph_are_counted_as_such(start: Start) -> None:
    engine = start(device="cuda", eager=True)
    engine.reset_stats()
    scenarios.stream(engine, scenarios.open_slot(engine, [1, 2, 3]), 5)
    stats = engine.stats()
    assert (stats["graph_replays"], stats["graph_fallbacks"]) == (0, 5)


def test_the_device_runs_a_launch_between_its_staging_and_its_end(start: Start) -> None:
    engine = start(device="cuda", model_dir=model_dir(), weights="checkpoint", max_ctx=1000)
    engine.reset_stats()
    slot, walls_us = scenarios.open_slot(engine, [1] * 200), []
    for token in range(300):
        begin_ns = time.perf_counter_ns()
        scenarios.step(engine, [(slot, token % 256)])
        walls_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    scenarios.stream(engine, slot, 300)
    steps = engine.figures().trace(MAX_TRACED)
    assert [step[0] for step in steps].count("step") == 600
    shift_us = min(step[7] * 1e6 - step[9] / 1e3 for step in steps)
    for *_, staged_s, _launched_s, seen_s, start_ns, end_ns in steps:
        assert staged_s * 1e6 - SLACK_US < start_ns / 1e3 + shift_us
        assert start_ns < end_ns <= (seen_s * 1e6 + SLACK_US - shift_us) * 1e3
    for before, after in pairwise(steps):
        assert before[9] <= after[8]  # one after the other
    alone = [step for step in tracing.read(steps) if not step.is_behind and step.kind == "step"]
    stages = [median(step.times_us[n + 1] - step.times_us[n] for step in alone) for n in range(5)]
    assert len(alone) >= 300
    assert sum(stages[1:]) == pytest.approx(median(walls_us), rel=0.5)
    device = engine.stats()["device_us"]["1"]
    assert stages[3] == pytest.approx(device["p50"], rel=0.2)
