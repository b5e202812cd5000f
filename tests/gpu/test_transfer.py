"""Export and adopt on cuda with graphs, bit for bit, and how long a piece holds the stream up."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pytest

import scenarios
import transfer_promises
from latentd.backend_cuda import CudaBackend
from latentd.backend_pages import HALF_BYTES
from latentd.model import published
from latentd_kernels import driver

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu
PIECE_BYTES = 16 << 20


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_an_adopted_slot_has_the_bits_of_its_source(start: Start, numerics: str) -> None:
    options = {"device": "cuda", "numerics": numerics, "max_ctx": 2100}
    source, target = start(**options), start(**options, prefill_chunk=64)
    for length in (61, 64, 125, 2000):
        transfer_promises.an_adopted_slot_has_the_bits_of_its_source(source, target, length, 70)


def test_a_stream_goes_on_in_another_engine(start: Start) -> None:
    transfer_promises.a_stream_goes_on_in_another_engine(start(device="cuda"), start(device="cuda"))


def test_what_lies_behind_the_last_token_does_not_travel(start: Start) -> None:
    transfer_promises.what_lies_behind_the_last_token_does_not_travel(
        start(device="cuda"), start(device="cuda")
    )


def test_adoptions_beside_a_stream_change_none_of_its_tokens(start: Start) -> None:
    source, target = start(device="cuda"), start(device="cuda", max_slots=40, kv_pages=200)
    transfer_promises.adoptions_beside_a_stream_change_none_of_its_tokens(source, target)


@pytest.fixture
def wide_dir(write_config: Callable[..., Path]) -> Path:
    """Four layers at DeepSeek-V2-Lite's widths."""
    return write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})


def test_an_adopted_slot_at_32k_has_the_bits_of_its_source(start: Start, wide_dir: Path) -> None:
    options = {"device": "cuda", "model_dir": wide_dir, "max_ctx": 33_000, "kv_pages": 520}
    source, target = start(**options), start(**options)
    slot = scenarios.open_slot(source, scenarios.draw_tokens(32_750, 1))
    other = scenarios.open_slot(target, scenarios.draw_tokens(100, 2))
    scenarios.close(target, other)
    scenarios.scramble(target, 3)
    adopted = transfer_promises.hand_over(source, slot, target, 40)
    assert adopted.token == slot.token
    for token in scenarios.draw_tokens(20, 4):
        assert scenarios.step(source, [(slot, token)]) == scenarios.step(target, [(adopted, token)])


def test_a_piece_holds_the_stream_up_for_no_more_than_its_copies(
    start: Start, wide_dir: Path
) -> None:
    """16 MB in and out, in more parts than the staging memory has halves."""
    engine = start(device="cuda", model_dir=wide_dir, max_ctx=4096, kv_pages=128)
    backend = engine.backend
    assert isinstance(backend, CudaBackend)
    count = PIECE_BYTES // engine.transfers.geometry.page_bytes
    pages = [int(page) for page in np.random.default_rng(1).permutation(128)[: 2 * count]]
    rng = np.random.default_rng(2)
    shape = (2 * count, engine.transfers.geometry.page_bytes)
    data = rng.integers(0, 256, shape, np.uint8)
    assert data.nbytes > 3 * HALF_BYTES
    backend.write_pages(pages, data)
    assert (backend.read_pages(pages) == data).all()
    writes, device, reads = [], [], []
    begun, ended = driver.Event(), driver.Event()
    for _ in range(5):
        start_s = time.perf_counter()
        begun.record(backend.stream)
        backend.write_pages(pages[:count], data[:count])
        ended.record(backend.stream)
        writes.append((time.perf_counter() - start_s) * 1e3)
        ended.synchronize()
        device.append(ended.elapsed_ms(begun))
        start_s = time.perf_counter()
        backend.read_pages(pages[:count])
        reads.append((time.perf_counter() - start_s) * 1e3)
    print(
        f"\n{count} pages, {data[:count].nbytes / 1e6:.1f} MB: write {median(writes):.2f} ms "
        f"(device {median(device):.2f}), read {median(reads):.2f} ms"
    )
    assert median(device) < 20
