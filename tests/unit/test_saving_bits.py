"""Save and restore on the cpu backend, bit for bit. tests/gpu has it for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import saving_promises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]


@pytest.mark.parametrize("length", [61, 64, 125, 200, 2000])
def test_restored_slots_go_on_with_the_same_bits(start: Start, tmp_path: Path, length: int) -> None:
    source, target = start(max_ctx=2100, prefill_chunk=512), start(max_ctx=2200, max_slots=6)
    saving_promises.restored_slots_go_on_with_the_same_bits(source, target, tmp_path, length, 70)


@pytest.mark.parametrize("changes", [{"numerics": "landed"}, {"dtype": "float32"}], ids=str)
def test_restored_slots_have_these_bits_in_other_numerics(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    source, target = start(**changes), start(**changes)
    saving_promises.restored_slots_go_on_with_the_same_bits(source, target, tmp_path, 130, 9)


def test_sampled_streams_go_on(start: Start, tmp_path: Path) -> None:
    saving_promises.sampled_streams_go_on(start(), start(), tmp_path)


def test_restored_pages_serve_as_prefixes(start: Start, tmp_path: Path) -> None:
    source, target = start(prefix_cache=True), start(prefix_cache=True)
    saving_promises.restored_pages_serve_as_prefixes(source, target, tmp_path)
