"""Forks and truncates on cuda with graphs, bit for bit, and what a fork of a long context costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import branch_promises
import scenarios
from latentd import demo
from latentd.backend_cuda import CudaBackend
from latentd.model import published
from latentd_kernels import driver

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


@pytest.fixture
def long_context(start: Start, write_config: Callable[..., Path]) -> Engine:
    """Four layers at DeepSeek-V2-Lite's widths with room for 32k tokens."""
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    return start(device="cuda", model_dir=path, max_ctx=33_000, kv_pages=2 * 516 + 8)


def test_a_fork_at_32k_has_the_bits_of_a_fresh_prompt(long_context: Engine) -> None:
    branch_promises.forks_have_the_bits_of_a_fresh_prompt(long_context, 32_767, 4)


def test_a_fork_at_32k_takes_no_longer_than_one_of_a_short_prompt(long_context: Engine) -> None:
    engine = long_context
    short = scenarios.open_slot(engine, scenarios.draw_tokens(70, 1))
    long = scenarios.open_slot(engine, scenarios.draw_tokens(32_750, 1))
    _time_fork(engine, short)
    for slot in (short, long):
        host_us, device_us = zip(*(_time_fork(engine, slot) for _ in range(9)), strict=True)
        print(
            f"\nfork at {slot.length}: host {min(host_us):.0f} us, device {min(device_us):.1f} us"
        )
        assert min(host_us) < 1000
        assert min(device_us) < 50
    assert engine.slots.pool.num_used == 2 + 512


def _time_fork(engine: Engine, slot: scenarios.Tracked) -> tuple[float, float]:
    """Microseconds of a fork on the host, its moves' start included, and of these on the device."""
    backend = engine.backend
    assert isinstance(backend, CudaBackend)
    start_s = time.perf_counter()
    fork = scenarios.fork(engine, slot)
    moves = engine.slots.take_moves()
    assert moves is not None
    assert (len(moves.copies), len(moves.rows)) == (1, 1)
    start, end = driver.Event(), driver.Event()
    start.record(backend.stream)
    backend.move(moves)
    end.record(backend.stream)
    host_s = time.perf_counter() - start_s
    end.synchronize()
    scenarios.close(engine, fork)
    return host_s * 1e6, end.elapsed_ms(start) * 1e3
