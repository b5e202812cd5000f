"""Forks and truncates on cuda with graphs, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import branch_promises
from latentd import demo
from latentd.model import published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu
LENGTHS = {1: 128, 7: 127, 64: 129, 100: 90, 512: 2000}
"""Of the prompts, by the length of their chunks."""


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_forks_have_the_bits_of_a_fresh_prompt(start: Start, numerics: str) -> None:
    for chunk, length in LENGTHS.items():
        engine = start(
            device="cuda", model_dir=demo.model_dir(), weights="checkpoint", numerics=numerics,
            max_ctx=2100, prefill_chunk=chunk,
        )  # fmt: skip
        branch_promises.forks_have_the_bits_of_a_fresh_prompt(engine, length, 70)


def test_a_truncated_slot_goes_on_like_a_fresh_prompt(start: Start) -> None:
    for chunk, length in LENGTHS.items():
        engine = start(device="cuda", max_ctx=2200, prefill_chunk=chunk)
        branch_promises.a_truncated_slot_goes_on_like_a_fresh_prompt(engine, length, 70)


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_a_truncated_fork_writes_into_no_page_of_others(start: Start, numerics: str) -> None:
    engine = start(device="cuda", numerics=numerics)
    branch_promises.a_truncated_fork_writes_into_no_page_of_others(engine, 200)


def test_samples_of_one_prompt_differ_and_repeat(start: Start) -> None:
    branch_promises.samples_of_one_prompt_differ_and_repeat(start(device="cuda"))


def test_a_fork_at_32k_has_the_bits_of_a_fresh_prompt(
    start: Start, write_config: Callable[..., Path]
) -> None:
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    engine = start(device="cuda", model_dir=path, max_ctx=33_000, kv_pages=600)
    branch_promises.forks_have_the_bits_of_a_fresh_prompt(engine, 32_767, 4)


def test_a_slot_truncated_at_32k_goes_on_like_a_fresh_prompt(
    start: Start, write_config: Callable[..., Path]
) -> None:
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    engine = start(device="cuda", model_dir=path, max_ctx=33_000, kv_pages=520)
    branch_promises.a_truncated_slot_goes_on_like_a_fresh_prompt(engine, 32_767, 70)
