"""Hits of the prefix cache on cuda with graphs, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cache_promises
import scenarios
from latentd import demo
from latentd.model import published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_a_hit_has_the_bits_of_a_cold_prompt(start: Start, numerics: str) -> None:
    for chunk, length in ((1, 129), (7, 193), (64, 190), (100, 128), (512, 2000)):
        engine = start(
            device="cuda", model_dir=demo.model_dir(), weights="checkpoint", numerics=numerics,
            max_ctx=2200, prefill_chunk=chunk, prefix_cache=True,
        )  # fmt: skip
        cache_promises.a_hit_has_the_bits_of_a_cold_prompt(engine, length, 70)


def test_a_hit_at_32k_has_the_bits_of_a_cold_prompt(
    start: Start, write_config: Callable[..., Path]
) -> None:
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    engine = start(device="cuda", model_dir=path, max_ctx=33_000, kv_pages=800, prefix_cache=True)
    scenarios.close(engine, scenarios.open_slot(engine, scenarios.draw_tokens(32_600, 9)))
    cache_promises.a_long_hit_has_the_bits_of_a_cold_prompt(engine, 32_000, 5)
    assert engine.slots.pool.num_evicted > 0
