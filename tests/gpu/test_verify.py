"""Verified drafts on cuda with graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import scenarios
import verify_promises as promises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine
    from latentd.operations import SamplingParams

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sampling", [scenarios.GREEDY, promises.HOT], ids=["greedy", "drawn"])
def test_drafts_change_no_token(start: Start, sampling: SamplingParams) -> None:
    promises.drafts_change_no_token(start(device="cuda", max_slots=8, max_ctx=400), sampling, 150)


def test_rows_of_many_slots_share_a_step(start: Start) -> None:
    promises.rows_of_many_slots_share_a_step(start(device="cuda", max_slots=6), 6)


def test_drafts_change_no_token_behind_32_thousand(
    write_config: Callable[..., Path], start: Start
) -> None:
    path = write_config(max_position_embeddings=65_536)
    engine = start(device="cuda", model_dir=path, max_slots=8, max_ctx=33_000)
    promises.drafts_change_no_token(engine, promises.HOT, 40, prompt_len=32_700)
