"""Verified drafts on the cpu backend; tests/gpu/test_verify.py has them for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import scenarios
import verify_promises as promises

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine
    from latentd.operations import SamplingParams

    Start = Callable[..., Engine]


@pytest.mark.parametrize("sampling", [scenarios.GREEDY, promises.HOT], ids=["greedy", "drawn"])
def test_drafts_change_no_token(start: Start, sampling: SamplingParams) -> None:
    promises.drafts_change_no_token(start(max_slots=8, max_ctx=400), sampling, 60)


def test_rows_of_many_slots_share_a_step(start: Start) -> None:
    promises.rows_of_many_slots_share_a_step(start(max_slots=6), 6)


def test_drafts_change_no_token_behind_two_thousand(start: Start) -> None:
    engine = start(max_slots=8, max_ctx=2048, prefill_chunk=512)
    promises.drafts_change_no_token(engine, promises.HOT, 12, prompt_len=1980)
