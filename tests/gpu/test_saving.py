"""Save and restore on cuda with graphs, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import saving_promises
from latentd import demo
from latentd.model import published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_restored_slots_go_on_with_the_same_bits(
    start: Start, tmp_path: Path, numerics: str
) -> None:
    common = {"device": "cuda", "numerics": numerics, "max_ctx": 2100}
    model = {"model_dir": demo.model_dir(), "weights": "checkpoint"}
    source, target = start(**common, **model), start(**common, **model, prefill_chunk=64)
    for length in (61, 64, 125, 2000):
        saving_promises.restored_slots_go_on_with_the_same_bits(
            source, target, tmp_path, length, 70
        )


def test_sampled_streams_go_on(start: Start, tmp_path: Path) -> None:
    saving_promises.sampled_streams_go_on(start(device="cuda"), start(device="cuda"), tmp_path)


def test_restored_pages_serve_as_prefixes(start: Start, tmp_path: Path) -> None:
    source, target = (start(device="cuda", prefix_cache=True) for _ in range(2))
    saving_promises.restored_pages_serve_as_prefixes(source, target, tmp_path)


def test_slots_restored_at_32k_go_on_with_the_same_bits(
    start: Start, tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    path = write_config(**published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4})
    options = {"device": "cuda", "model_dir": path, "max_ctx": 33_000, "kv_pages": 600}
    source, target = start(**options), start(**options)
    saving_promises.restored_slots_go_on_with_the_same_bits(source, target, tmp_path, 32_767, 4)
