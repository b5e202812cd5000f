"""The promise on cuda with graphs: same tokens in, same bits out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import scenarios
from latentd.operations import SamplingParams
from latentd.options import BUCKETS
from latentd.selftest_probe import slab_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_page_order_and_dirty_pages_change_no_logit(start: Start, numerics: str) -> None:
    engine = start(device="cuda", max_ctx=256, max_slots=2, kv_pages=12, numerics=numerics)
    prompt, forced = scenarios.draw_tokens(50, 1), scenarios.draw_tokens(200, 2)
    clean = scenarios.next_pages(engine, 4)
    assert not slab_of(engine)[clean].any()
    first = scenarios.decode(engine, prompt, forced)
    for arrange in (scenarios.reverse, lambda e: scenarios.scramble(e, 3)):
        arrange(engine)
        scenarios.close(engine, scenarios.open_slot(engine, scenarios.draw_tokens(255, 9)))
        pages = scenarios.next_pages(engine, 4)  # with the other slot's latents in them
        assert pages != clean
        assert all(bool(page.any()) for page in slab_of(engine)[pages])
        assert scenarios.decode(engine, prompt, forced) == first


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_that_run_ahead_and_steps_sample_the_same_tokens(
    start: Start, temperature: float
) -> None:
    sampling = SamplingParams(temperature, top_k=50, top_p=0.95, seed=(1 << 64) - 3)
    engine = start(device="cuda")
    slot = scenarios.open_slot(engine, [1, 2, 3], sampling)
    streamed = [slot.token, *scenarios.stream(engine, slot, 200)]
    other = scenarios.open_slot(engine, [1, 2, 3], sampling)
    stepped = [other.token]
    for _ in range(200):
        scenarios.step(engine, [(other, None)])
        stepped.append(other.token)
    assert stepped == streamed


def test_the_device_table_follows_the_mirror(start: Start) -> None:
    engine = start(device="cuda", max_ctx=200, max_slots=3, kv_pages=12)
    table = engine.backend.runner.buffers.inputs.block_table  # type: ignore[attr-defined]
    slots = [scenarios.open_slot(engine, scenarios.draw_tokens(130, n)) for n in range(3)]
    assert (table.cpu().numpy() == engine.slots.table).all()
    scenarios.take_back(engine, slots[0], 60)
    scenarios.close(engine, slots[1])
    scenarios.open_slot(engine, [5])
    assert (table.cpu().numpy() == engine.slots.table).all()


def test_the_bits_do_not_depend_on_how_far_out_a_page_lies(
    write_config: Callable[..., Path], start: Start
) -> None:
    # 24 layers: an int32 element offset wraps at page 2428, a byte offset before that.
    path = write_config(num_hidden_layers=24, n_routed_experts=None)
    engine = start(device="cuda", model_dir=path, max_ctx=130, max_slots=2, kv_pages=5000)
    slab = engine.backend.runner.buffers.slab  # type: ignore[attr-defined]
    pool = engine.slots.pool
    prompt, forced = scenarios.draw_tokens(62, 6), scenarios.draw_tokens(8, 7)
    outcomes = []
    for pages in ([1, 2], [4999, 4861]):
        pool.reorder(pages + [page for page in pool.free_pages() if page not in pages])
        logits = scenarios.decode(engine, prompt, forced)
        outcomes.append((logits, [slab[page].float().cpu().numpy().tobytes() for page in pages]))
    assert outcomes[0] == outcomes[1]
    assert np.frombuffer(outcomes[0][1][1], np.float32).any()
