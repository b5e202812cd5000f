"""The promise on cuda with graphs: same tokens in, same bits out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import promises
import scenarios
from latentd.options import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_page_order_and_dirty_pages_change_no_logit(start: Start, numerics: str) -> None:
    engine = start(device="cuda", max_ctx=256, max_slots=2, kv_pages=12, numerics=numerics)
    promises.page_order_and_dirty_pages_change_no_logit(engine)


def test_a_row_alone_has_the_bits_of_the_row_in_every_bucket(start: Start) -> None:
    engine = start(device="cuda", max_ctx=200, max_slots=128)
    lengths = [1, 63, 64, 65, 127, 128, 129, 198]
    slots = [
        scenarios.open_slot(engine, scenarios.draw_tokens(lengths[n % 8], n)) for n in range(128)
    ]
    alone = []
    for n, slot in enumerate(slots):
        length = slot.length
        alone += scenarios.step(engine, [(slot, n)], 1)
        scenarios.take_back(engine, slot, length)
    for bucket in BUCKETS:
        for first in {0, 128 - bucket}:
            rows = [(slots[n], n) for n in range(first, first + bucket)]
            before = [slot.length for slot, _ in rows]
            found = scenarios.step(engine, rows, bucket)
            unlike = [n for n, bits in enumerate(found) if bits != alone[first + n]]
            assert not unlike, f"bucket {bucket}"
            for (slot, _), length in zip(rows, before, strict=True):
                scenarios.take_back(engine, slot, length)


def test_chunks_of_any_size_and_steps_give_the_same_bits(start: Start) -> None:
    prompt = scenarios.draw_tokens(290, 4)
    found = set()
    for chunk in (512, 200, 64, 13):
        engine = start(device="cuda", prefill_chunk=chunk)
        found.add(scenarios.open_slot(engine, prompt).logits)
    slot = scenarios.open_slot(engine, [])
    for token in prompt:
        logits = scenarios.step(engine, [(slot, token)])[0]
    found.add(logits)
    assert len(found) == 1


def test_chunks_of_any_size_give_the_same_bits_at_32_thousand(
    write_config: Callable[..., Path], start: Start
) -> None:
    path = write_config(max_position_embeddings=40_000)
    prompt, forced = scenarios.draw_tokens(32_700, 5), scenarios.draw_tokens(70, 6)
    found = set()
    for chunk in (512, 100, 64, 7, 1):
        engine = start(
            device="cuda", model_dir=path, prefill_chunk=chunk, max_ctx=33_000, max_slots=1
        )  # fmt: skip
        scenarios.scramble(engine, chunk)
        found.add(tuple(scenarios.decode(engine, prompt, forced)))
    assert len(found) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_and_steps_sample_the_same_tokens(start: Start, temperature: float) -> None:
    promises.streams_and_steps_sample_the_same_tokens(start(device="cuda"), temperature, 200)


def test_the_device_table_follows_the_mirror(start: Start) -> None:
    engine = start(device="cuda", max_ctx=200, max_slots=3, kv_pages=12)
    promises.the_device_table_follows_the_mirror(engine)


def test_the_bits_do_not_depend_on_how_far_out_a_page_lies(
    write_config: Callable[..., Path], start: Start
) -> None:
    path = write_config(num_hidden_layers=24, n_routed_experts=None)
    engine = start(device="cuda", model_dir=path, max_ctx=130, max_slots=2, kv_pages=5000)
    promises.far_pages_give_the_same_bits(engine, steps=8)


def test_a_step_writes_one_row_a_layer(start: Start) -> None:
    promises.a_step_writes_one_row_a_layer(start(device="cuda", max_ctx=100, max_slots=16))
