"""A request that is refused or cancelled takes down nobody who runs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import batch_promises
from batch_promises import MAX_CTX, PAGES
from latentd_client import Client, RequestRejected
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine
    from latentd_client.results import Step

    Start = Callable[..., Engine]


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_rows_that_cannot_run_change_no_bit_of_their_mates(start: Start, numerics: str) -> None:
    engine = start(max_ctx=MAX_CTX, max_slots=8, kv_pages=PAGES, numerics=numerics)
    batch_promises.rows_that_cannot_run_change_no_bit_of_their_mates(engine)


def bits(step: Step) -> bytes:
    assert step.logits is not None
    return step.logits.tobytes()


def test_a_client_gets_the_bits_of_the_rows_beside_the_refused_ones(
    start: Start, endpoint: str
) -> None:
    engine = start(max_ctx=70, max_slots=8, kv_pages=6)
    with serving(endpoint, engine), Client(endpoint) as client:
        full, starved, bad, first, last = (
            client.open([n + 1] * length) for n, length in enumerate((69, 64, 3, 5, 60))
        )
        full.step(1)
        alone = [bits(slot.step(9, logits=True)) for slot in (first, last)]
        for slot in (first, last):
            slot.truncate(slot.context_len - 1)
        rows = [(first, 9), (full, 9), (starved, 9), (bad, 256), (last, 9)]
        with pytest.raises(RequestRejected, match="row 1 of 5") as refusal:
            client.step(rows, logits=True)
        found: Any = refusal.value.detail["rows"]
        codes = [row.code for row in found if isinstance(row, RequestRejected)]
        assert codes == ["context_full", "no_pages", "invalid"]
        assert [bits(found[0]), bits(found[4])] == alone
        full.close()
        assert (starved.step(9).context_len, bad.step(9).context_len) == (65, 4)
