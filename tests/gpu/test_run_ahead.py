"""Streams that run ahead on the device have the bits of single steps, whoever runs beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ahead_promises
from latentd.model import published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("numerics", "temperature"), [("f32", 0.8), ("f32", 0.0), ("landed", 0.8)])
def test_a_stream_has_the_bits_of_steps_alone_and_beside_63_others(
    start: Start, numerics: str, temperature: float
) -> None:
    engine = start(device="cuda", max_ctx=400, max_slots=64, numerics=numerics)
    ahead_promises.a_stream_has_the_bits_of_steps(engine, 190, 140, temperature, others=63)


def test_a_stream_at_32k_has_the_bits_of_steps_alone_and_beside_63_others(
    start: Start, write_config: Callable[..., Path]
) -> None:
    path = write_config(max_position_embeddings=40_000)
    engine = start(
        device="cuda", model_dir=path, max_ctx=33_000, max_slots=64, kv_pages=3200
    )  # fmt: skip
    ahead_promises.a_stream_has_the_bits_of_steps(engine, 32_700, 100, 0.8, others=63)


def test_a_step_in_vain_leaves_no_trace(start: Start) -> None:
    ahead_promises.a_step_in_vain_leaves_no_trace(start(device="cuda"))


def test_chunks_beside_streams_have_the_bits_of_a_prompt_alone(start: Start) -> None:
    engine = start(device="cuda", max_ctx=4000)
    ahead_promises.chunks_beside_streams_change_no_bit(engine, 1500, (7, 64, 100, 512))
    ahead_promises.chunks_beside_streams_change_no_bit(engine, 300, (1,))


def test_a_32k_prompt_beside_streams_has_the_bits_of_one_alone(
    start: Start, write_config: Callable[..., Path]
) -> None:
    path = write_config(max_position_embeddings=40_000)
    engine = start(device="cuda", model_dir=path, max_ctx=33_000, kv_pages=2100)
    ahead_promises.chunks_beside_streams_change_no_bit(engine, 32_500, (128, 100))


@pytest.mark.parametrize("others", [0, 5])
def test_the_device_hardly_waits_between_steps_whoever_joins_and_leaves(
    start: Start, write_config: Callable[..., Path], others: int
) -> None:
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    engine = start(device="cuda", model_dir=path, max_ctx=2000, max_slots=6)
    idle = ahead_promises.idle_us(engine, 1500, others)
    assert idle["p50"] <= 3.0
    assert idle["p99"] <= 6.0
