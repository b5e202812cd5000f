"""Forks and truncates on the cpu backend, bit for bit. tests/gpu has it for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import branch_promises

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]


@pytest.mark.parametrize(
    ("length", "chunk"), [(128, 1), (127, 7), (129, 64), (90, 100), (2000, 512)]
)
def test_forks_have_the_bits_of_a_fresh_prompt(start: Start, length: int, chunk: int) -> None:
    engine = start(max_ctx=2100, prefill_chunk=chunk)
    branch_promises.forks_have_the_bits_of_a_fresh_prompt(engine, length, 70)


@pytest.mark.parametrize(("length", "chunk"), [(64, 100), (70, 7), (1, 64), (2000, 512)])
def test_a_truncated_slot_goes_on_like_a_fresh_prompt(
    start: Start, length: int, chunk: int
) -> None:
    engine = start(max_ctx=2200, prefill_chunk=chunk)
    branch_promises.a_truncated_slot_goes_on_like_a_fresh_prompt(engine, length, 70)


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_a_truncated_fork_writes_into_no_page_of_others(start: Start, numerics: str) -> None:
    engine = start(numerics=numerics)
    branch_promises.a_truncated_fork_writes_into_no_page_of_others(engine, 200)


def test_samples_of_one_prompt_differ_and_repeat(start: Start) -> None:
    branch_promises.samples_of_one_prompt_differ_and_repeat(start())
