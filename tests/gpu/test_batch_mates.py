"""Rows that are refused or cancelled take down nobody who runs beside them, on cuda with graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import batch_promises
from batch_promises import MAX_CTX, PAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_rows_that_cannot_run_change_no_bit_of_their_mates(start: Start, numerics: str) -> None:
    engine = start(
        device="cuda", max_ctx=MAX_CTX, max_slots=8, kv_pages=PAGES, numerics=numerics
    )  # fmt: skip
    batch_promises.rows_that_cannot_run_change_no_bit_of_their_mates(engine)
