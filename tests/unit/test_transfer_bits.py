"""Export and adopt on the cpu backend, bit for bit. tests/gpu has it for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import transfer_promises

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]


@pytest.mark.parametrize("length", [61, 64, 125, 200, 2000])
def test_an_adopted_slot_has_the_bits_of_its_source(start: Start, length: int) -> None:
    source, target = start(max_ctx=2100, prefill_chunk=512), start(max_ctx=2200, prefill_chunk=64)
    assert source.info.fingerprint == target.info.fingerprint
    transfer_promises.an_adopted_slot_has_the_bits_of_its_source(source, target, length, 70)


@pytest.mark.parametrize("changes", [{"numerics": "landed"}, {"dtype": "float32"}], ids=str)
def test_an_adopted_slot_has_these_bits_in_other_numerics(
    start: Start, changes: dict[str, str]
) -> None:
    source, target = start(**changes), start(**changes)
    transfer_promises.an_adopted_slot_has_the_bits_of_its_source(source, target, 130, 9)


def test_a_stream_goes_on_in_another_engine(start: Start) -> None:
    transfer_promises.a_stream_goes_on_in_another_engine(start(), start())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_lies_behind_the_last_token_does_not_travel(start: Start, dtype: str) -> None:
    transfer_promises.what_lies_behind_the_last_token_does_not_travel(
        start(dtype=dtype), start(dtype=dtype)
    )


def test_adoptions_beside_a_stream_change_none_of_its_tokens(start: Start) -> None:
    source, target = start(), start(max_slots=40, kv_pages=200)
    transfer_promises.adoptions_beside_a_stream_change_none_of_its_tokens(source, target)


def test_a_page_that_a_copy_in_flight_still_goes_to_can_be_adopted_into(start: Start) -> None:
    transfer_promises.a_page_that_a_copy_in_flight_still_goes_to_can_be_adopted_into(start())
