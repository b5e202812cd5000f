"""The quick look at a step's header against the general checks, and the packed reply."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentd import requests, requests_step
from latentd.packed import pack_head, pack_tail
from latentd_client import fields, protocol
from latentd_client._calls import Calls
from latentd_client._exchange import Call, Exchange
from latentd_client._slot import BaseSlot
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

INTS = st.sampled_from([0, 1, 3, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1])
VALUES: st.SearchStrategy[Any] = INTS | st.sampled_from(
    [
        None, True, False, 1.0, float("nan"), float("inf"), 1e9, 2e9, -0.5, "", "x", "x" * 65, b"x",
        [], [{}], {}, {"raw": 0}, [1], {"temperature": 1.0},
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "v", "id", "op", "slot", "epoch", "pos", "token", "logits", "session", "deadline_s", "rows",
        "sampling", "raw", "mask", "other",
    ]
)  # fmt: skip
ROW = {"slot": 1, "epoch": 2, "pos": 3}
ONE = {"v": 1, "id": 5, "op": "step", **ROW, "session": "s", "deadline_s": 1.0}
BATCH = {"v": 1, "id": 5, "op": "step", "session": "s", "rows": [ROW, ROW], "deadline_s": 1.0}
OPTIONS = st.sampled_from([{}, {"token": 7}, {"logits": True}, {"token": 7, "logits": False}])
CHANGES = st.dictionaries(NAMES, VALUES, max_size=2)


def passes_general_checks(header: dict[str, Any]) -> bool:
    if header.get("op") != "step" or not requests.is_version(header) or "raw" in header:
        return False
    has_rows = header.get("rows") is not None
    try:
        fields.check(fields.STEP_ROWS if has_rows else fields.OPS["step"], header, "step")
    except RequestRejected:
        return False
    return True


def ordered(row: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A row with its options where clients put them."""
    return {**{k: v for k, v in row.items() if k in ROW}, **options}


@given(OPTIONS, CHANGES, st.sets(NAMES, max_size=2))
def test_a_plain_step_of_one_row_passes_the_general_checks(
    options: dict[str, Any], changes: dict[str, Any], dropped: set[str]
) -> None:
    plain = {"v": 1, "id": 5, "op": "step", **ordered(ROW, options), "session": "s"}
    assert requests_step.is_plain(plain)
    header = {k: v for k, v in {**plain, **changes}.items() if k not in dropped}
    if requests_step.is_plain({"id": 5, **header}):
        assert passes_general_checks(header)


@given(
    st.lists(st.tuples(OPTIONS, CHANGES, st.sets(NAMES, max_size=1)), max_size=4),
    CHANGES,
    st.sets(NAMES, max_size=1),
)
def test_a_plain_step_of_rows_passes_the_general_checks(
    rows: Sequence[tuple[dict[str, Any], dict[str, Any], set[str]]],
    changes: dict[str, Any],
    dropped: set[str],
) -> None:
    given_rows = [
        {k: v for k, v in {**ordered(ROW, options), **row_changes}.items() if k not in gone}
        for options, row_changes, gone in rows
    ]
    header = {k: v for k, v in {**BATCH, "rows": given_rows, **changes}.items() if k not in dropped}
    if requests_step.is_plain({"id": 5, **header}):
        assert passes_general_checks(header)


@given(st.permutations(list(ONE)))
def test_the_order_of_fields_does_not_matter(names: list[str]) -> None:
    assert requests_step.is_plain({name: ONE[name] for name in names})


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": 2}, {"v": True}, {"v": 1.0}, {"op": "stream"}, {"slot": -1}, {"slot": True},
        {"slot": 1.0}, {"epoch": 1 << 63}, {"pos": -1}, {"session": ""}, {"session": "x" * 65},
        {"deadline_s": float("nan")}, {"deadline_s": -1.0}, {"deadline_s": 2e9}, {"raw": []},
        {"mask": 1}, {"token": None}, {"other": 1}, {"logits": 1}, {"sampling": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_step_with_one_wrong_field_is_not_plain(wrong: dict[str, Any]) -> None:
    assert requests_step.is_plain(ONE)
    assert not requests_step.is_plain({**ONE, **wrong})


@pytest.mark.parametrize(
    "rows",
    [
        [], [ROW, 1], [ROW, None], [ROW, {}], [ROW, {**ROW, "slot": -1}],
        [{**ROW, "slot": 1 << 31}], [ROW, {**ROW, "pos": True}], [{**ROW, "token": -1}, ROW],
        [{**ROW, "token": None}],
        [{**ROW, "logits": 1}], [{**ROW, "mask": 1}], [ROW] * 129,
    ],
    ids=lambda rows: str(rows)[:60],
)  # fmt: skip
def test_rows_with_one_wrong_field_are_not_plain(rows: list[Any]) -> None:
    assert requests_step.is_plain(BATCH)
    assert not requests_step.is_plain({**BATCH, "rows": rows})


@pytest.mark.parametrize("token", [None, 5], ids=["sampled", "forced"])
@pytest.mark.parametrize("logits", [False, True], ids=["plain", "logits"])
def test_what_our_clients_write_is_plain(token: int | None, logits: bool) -> None:
    calls, exchange = Calls(30.0), Exchange()
    calls.session = "0" * 48
    slot = BaseSlot({**ROW, "context_len": 3, "token": 4}, [])
    for script in (
        calls.step(slot, token, logits, None, None),
        calls.step_rows([(slot, token), (slot, None)], logits, 5.0),
    ):
        call = next(script)
        assert isinstance(call, Call)
        _, frames = exchange.start(call)
        assert requests_step.is_plain(protocol.decode_header(bytes(frames[0])))


@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 20),
    st.integers(0, (1 << 31) - 1),
    st.floats(width=32, allow_nan=False),
)
def test_a_packed_reply_is_the_same_map(
    request_id: int, context_len: int, token: int, logprob: float
) -> None:
    frame = pack_head(request_id, context_len) + pack_tail(token, logprob)
    results = {"token": token, "context_len": context_len, "logprob": logprob}
    expected = {"v": 1, "id": request_id, "status": "ok", **results}
    assert msgpack.unpackb(frame) == expected
    assert struct.pack("d", msgpack.unpackb(frame)["logprob"]) == struct.pack("d", logprob)
