"""Hits of the prefix cache on the cpu backend, bit for bit. tests/gpu has it for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cache_promises

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]


@pytest.mark.parametrize(("length", "chunk"), [(129, 1), (193, 7), (190, 64), (128, 100)])
@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_a_hit_has_the_bits_of_a_cold_prompt(
    start: Start, numerics: str, length: int, chunk: int
) -> None:
    engine = start(prefix_cache=True, prefill_chunk=chunk, numerics=numerics)
    cache_promises.a_hit_has_the_bits_of_a_cold_prompt(engine, length, 5)


def test_a_long_hit_has_the_bits_of_a_cold_prompt(start: Start) -> None:
    engine = start(prefix_cache=True, prefill_chunk=512, max_ctx=2100)
    cache_promises.a_long_hit_has_the_bits_of_a_cold_prompt(engine, 2000, 5)
