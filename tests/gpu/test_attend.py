"""Attention for clients on cuda with graphs: the bits of the daemon's own steps run eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import attend_promises
import scenarios
from attend_promises import EngineService, random_rows
from latentd.backend_cuda import CudaBackend
from latentd.demo import model_dir
from latentd.model import published
from latentd.operations import AttendDone, SamplingParams, StreamTokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]
    WriteConfig = Callable[..., Path]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_steps_recorded_in_one_engine_have_the_same_bits_in_another(
    start: Start, numerics: str
) -> None:
    options = {"device": "cuda", "numerics": numerics, "max_ctx": 2100, "max_slots": 16}
    own, service = start(**options, eager=True), start(**options)
    for lengths in ([61], [5, 63, 64, 130], [*range(1, 900, 60), 2000]):
        attend_promises.steps_recorded_in_one_engine_have_the_same_bits_in_another(
            own, service, lengths, 3
        )


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_all_forms_of_the_kernels_take_the_layer_that_the_step_names(
    start: Start, write_config: WriteConfig, heads: int, numerics: str
) -> None:
    folder = write_config(
        num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=3,
        first_k_dense_replace=3,
    )  # fmt: skip
    options: dict[str, Any] = {
        "model_dir": folder, "device": "cuda", "numerics": numerics, "max_slots": 64,
        "kv_pages": 200,
    }  # fmt: skip
    own, service = start(**options, eager=True), start(**options)
    for rows in (1, 2, 8, 12, 40):
        attend_promises.steps_recorded_in_one_engine_have_the_same_bits_in_another(
            own, service, [3 * row + 1 for row in range(rows)], 1
        )


def test_a_wide_head_takes_the_layer_that_the_step_names(
    start: Start, write_config: WriteConfig
) -> None:
    folder = write_config(
        num_attention_heads=20, num_key_value_heads=20, qk_nope_head_dim=192, v_head_dim=256
    )
    options: dict[str, Any] = {"model_dir": folder, "device": "cuda", "max_slots": 16}
    own, service = start(**options, eager=True), start(**options)
    for lengths in ([61], [1, 64, 130]):
        attend_promises.steps_recorded_in_one_engine_have_the_same_bits_in_another(
            own, service, lengths, 2
        )


def test_a_context_of_32k_has_the_bits_of_the_daemons_own_step(
    start: Start, write_config: WriteConfig
) -> None:
    folder = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    options: dict[str, Any] = {
        "model_dir": folder, "device": "cuda", "max_ctx": 33_000, "max_slots": 2
    }  # fmt: skip
    attend_promises.steps_recorded_in_one_engine_have_the_same_bits_in_another(
        start(**options, eager=True), start(**options), [32_700, 100], 2
    )


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_a_prompt_in_runs_has_the_bits_of_its_chunks(start: Start, numerics: str) -> None:
    options = {"device": "cuda", "numerics": numerics, "max_slots": 128, "max_ctx": 600}
    own = start(**options, prefill_chunk=128, eager=True)
    attend_promises.a_prompt_in_runs_has_the_bits_of_its_chunks(own, start(**options), 391)


@pytest.mark.parametrize(("numerics", "nodes"), [("f32", 9), ("landed", 10)])
def test_one_graph_a_bucket_serves_all_layers(start: Start, numerics: str, nodes: int) -> None:
    engine = start(device="cuda", numerics=numerics, selftest=True)
    assert isinstance(engine.backend, CudaBackend)
    assert set(engine.backend.attend_graphs.num_nodes) == set(engine.info.buckets)
    assert set(engine.backend.attend_graphs.num_nodes.values()) == {nodes}
    assert any("attend, graph = eager" in line for line in engine.startup.selftest)


def test_a_daemon_of_attention_alone_has_the_bits_of_one_of_the_whole_model(start: Start) -> None:
    usual: dict[str, Any] = {
        "model_dir": model_dir(), "weights": "checkpoint", "device": "cuda", "kv_pages": "auto"
    }  # fmt: skip
    full, alone = start(**usual), start(attend_only=True, selftest=True, **usual)
    attend_promises.daemons_of_both_kinds_have_the_same_bits(full, alone, 70)


def test_attention_beside_a_stream_changes_no_bit_of_either(start: Start) -> None:
    engines = [start(device="cuda", max_ctx=600) for _ in range(2)]
    texts, results = [], []
    for engine, is_beside in zip(engines, (False, True), strict=True):
        slot = scenarios.open_slot(engine, scenarios.draw_tokens(130, 2))
        sends, tokens = EngineService(engine), []
        if not is_beside:
            texts.append(scenarios.stream(engine, slot, 300))
            results.append([_attend(sends, pos) for pos in range(100)])
            continue
        seat = slot.request.slot_id, slot.request.epoch
        scenarios.start_stream(engine, seat, slot.length, 300)
        opened = engine.admit_open([], SamplingParams(), False)
        found, pos, layer = [], 0, 0
        while engine.has_work or pos < 100:
            if pos < 100 and engine.slots.slots[opened.slot_id].task is None:
                rows = [(opened.slot_id, opened.epoch, pos)]
                engine.admit_attend(layer, rows, *random_rows(engine, 1, pos))
                layer = (layer + 1) % engine.info.layers
                pos += layer == 0
            for event in engine.run():
                if isinstance(event, StreamTokens):
                    tokens += event.tokens
                elif isinstance(event, AttendDone) and event.request.layer:
                    found.append(event.o.tobytes())
        texts.append(tokens)
        results.append(found)
    assert texts[0] == texts[1]
    assert results[0] == results[1]


def _attend(sends: EngineService, pos: int) -> bytes:
    """One position in all layers; the results of the last."""
    o = np.empty(0)
    for layer in range(sends.engine.info.layers):
        o = sends(layer, [(0, pos)], *random_rows(sends.engine, 1, pos))
    return o.tobytes()
