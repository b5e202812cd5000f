"""Logit bias and masks over the wire: both clients, raw frames, refusals, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine, fake_logits
from latentd import limits as daemon_limits
from latentd.limits import make_limits
from latentd_client import ProtocolError, RequestRejected, protocol
from latentd_kernels import limits as kernel_limits
from serving import Peer, seat

if TYPE_CHECKING:
    from collections.abc import Callable


def allow(*tokens: int, vocab: int = 256) -> np.ndarray:
    mask = np.zeros(vocab, np.bool_)
    mask[list(tokens)] = True
    return mask


def words(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask, bitorder="little").view(np.uint32)


def test_a_mask_leaves_only_what_it_allows(client: Any, engine: FakeEngine) -> None:
    slot = client.open([1, 2], mask=allow(30))
    assert slot.token == 30
    step = slot.step(mask=allow(9, 17), logits=True)
    assert step.token == 17  # fake logits rise with the id
    assert np.flatnonzero(np.isfinite(step.logits)).tolist() == [9, 17]
    assert slot.step().token == engine.expected_token([1, 2, 30, 17])


@pytest.mark.parametrize("form", [lambda mask: np.packbits(mask, bitorder="little"), words])
def test_a_mask_may_come_as_bits(client: Any, form: Any) -> None:
    assert client.open([1], mask=form(allow(0, 200, 77))).token == 200


def test_a_bias_is_added_to_the_logits(client: Any) -> None:
    logits = client.open([1, 2], bias={5: 100.0, 6: -1.5}, logits=True).logits
    expected = fake_logits([1, 2], 256)
    expected[5] += np.float32(100.0)
    expected[6] -= np.float32(1.5)
    assert logits.tobytes() == expected.tobytes()
    assert client.open([1, 2], bias=([5, 6], np.array([100.0, -1.5]))).token == 5


def test_limits_hold_for_all_tokens_of_a_stream_and_no_longer(
    client: Any, engine: FakeEngine
) -> None:
    slot = client.open([1, 2])
    first = slot.token
    assert [step.token for step in slot.stream(5, mask=allow(3, 4))] == [4] * 5
    expected = engine.expected_token([1, 2, first, *[4] * 5])
    assert slot.step().token == expected


def test_the_rows_of_a_step_have_a_mask_each(client: Any, engine: FakeEngine) -> None:
    slots = [client.open([n]) for n in range(3)]
    rows = [(slot, 8) for slot in slots]
    steps = client.step(rows, masks=[allow(1), None, allow(2)])
    assert [step.token for step in steps] == [1, engine.expected_token([1, 8]), 2]
    with pytest.raises(ProtocolError, match="masks are 2, must be one for each of 3 rows"):
        client.step(rows, masks=[allow(1), None])


def test_what_cannot_be_a_mask_or_bias_is_told_before_it_is_sent(client: Any) -> None:
    for mask in (np.zeros(256), [1, 2], np.zeros((2, 128), np.bool_)):
        with pytest.raises(ProtocolError, match="mask"):
            client.open([1], mask=mask)
    for bias in ({"a": 1.0}, {1: "b"}, 7):
        with pytest.raises(ProtocolError, match="bias"):
            client.open([1], bias=bias)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of another size": ({"mask": np.ones(8, np.bool_)}, "has 1 bytes, must be 32"),
    "words of another size": ({"mask": words(allow(1, vocab=288))}, "has 9 words, must be 8"),
    "a mask that forbids all": ({"mask": allow()}, "forbids all tokens"),
    "a bias that is no number": ({"bias": {1: float("nan")}}, "bias is nan for id 1"),
    "an infinite bias": ({"bias": {1: float("-inf")}}, "bias is -inf for id 1"),
    "a bias without bounds": ({"bias": {1: 1e31}}, "must be -1e"),
    "a bias that float32 does not hold": ({"bias": {1: 1e39}}, "bias is inf for id 1"),
    "an id outside": ({"bias": {256: 1.0}}, "names id 256, must be 0 to 255"),
    "an id below": ({"bias": {-1: 1.0}}, "names id -1"),
    "an id twice": ({"bias": ([4, 4], [1.0, 1.0])}, "names an id twice"),
    "lists of two lengths": ({"bias": ([4, 5], [1.0])}, "has 2 ids and 1 values"),
    "too many": ({"bias": ([1] * 1025, [0.0] * 1025)}, "has 1025 ids, at most 1024"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_limits_are_refused_and_change_nothing(
    client: Any, engine: FakeEngine, wrong: str
) -> None:
    asked, text = WRONG[wrong]
    slot = client.open([1, 2])
    calls: list[Callable[[], Any]] = [lambda: client.open([1], **asked), lambda: slot.step(**asked)]
    for call in calls:
        with pytest.raises(RequestRejected, match=text) as refusal:
            call()
        assert refusal.value.code == "invalid"
    assert engine.slots.num_used == 1
    first = engine.expected_token([1, 2])
    assert slot.step().token == engine.expected_token([1, 2, first])


def test_a_frame_of_another_kind_is_refused(peer: Peer) -> None:
    opened = peer.open()
    for value in ({"raw": 1}, {"raw": 0}, {"raw": 0, "row": 1}):
        peer.send("step", [np.zeros(8, np.float32)], **seat(opened), mask=value)
        assert "must name a raw uint32 or uint8 frame" in peer.receive()[0]["error"]
    assert "must be" in peer.ask("step", **seat(opened), mask=[1])["error"]
    reply = peer.ask("step", **seat(opened), bias={"values": {"raw": 0}})
    assert "ids is missing" in reply["error"]


def test_the_same_limits_again_are_the_same_request_in_any_form(peer: Peer) -> None:
    opened, mask = peer.open(), allow(3, 80)
    forms: list[Any] = [words(mask), np.packbits(mask, bitorder="little"), words(mask)]
    replies = []
    for form in forms:
        peer.send("step", [form], **seat(opened), mask={"raw": 0})
        replies.append(peer.receive()[0])
    assert [reply["token"] for reply in replies] == [80] * 3
    assert [reply.get("replayed") for reply in replies] == [None, True, True]
    peer.send("step", [words(allow(3, 81))], **seat(opened), mask={"raw": 0})
    assert peer.receive()[0]["status"] == "position_conflict"
    assert peer.ask("step", **seat(opened))["status"] == "position_conflict"


def test_an_open_of_the_same_key_with_another_bias_is_refused(peer: Peer) -> None:
    ids, status = np.array([4], np.int32), []
    for value in (9.0, 9.0, 8.0):
        peer.send(
            "open", [ids, np.array([value], np.float32)], key="k", prompt=[1],
            bias={"ids": {"raw": 0}, "values": {"raw": 1}},
        )  # fmt: skip
        status.append(peer.receive()[0]["status"])
    assert status == ["ok", "ok", "invalid"]


def test_bits_beyond_the_vocabulary_do_not_count() -> None:
    mask = np.array([0, 1 << 3 | 1 << 20], np.uint32)
    found = make_limits(40, None, mask)
    assert found is not None
    assert found.mask is not None
    assert found.mask.tolist() == [0, 1 << 3]
    assert found == make_limits(40, None, np.array([0, 1 << 3], np.uint32))
    with pytest.raises(RequestRejected, match="forbids all"):
        make_limits(40, None, np.array([0, 1 << 20], np.uint32))


def test_a_closed_slots_limits_do_not_meet_its_next_tenant(client: Any, engine: FakeEngine) -> None:
    for _ in range(engine.info.max_slots):
        client.open([1, 2], mask=allow(30)).close()
    for n in range(engine.info.max_slots):
        assert client.open([1, n]).token == engine.expected_token([1, n])


def test_daemon_and_kernels_agree_on_the_most_biases() -> None:
    assert daemon_limits.MAX_BIAS == kernel_limits.MAX_BIAS


def test_a_raw_frame_may_be_named_by_row() -> None:
    raw: list[Any] = [np.arange(6, dtype=np.int32).reshape(2, 3)]
    assert protocol.pick_raw({"raw": 0, "row": 1}, raw).tolist() == [3, 4, 5]  # type: ignore[union-attr]
    for value in ({"raw": 0, "row": 2}, {"raw": 0, "row": True}, {"raw": 1, "row": 0}):
        assert protocol.pick_raw(value, raw) is None


def test_a_stored_bias_does_not_hold_the_frame_that_it_was_a_row_of() -> None:
    ids, values = np.zeros((1000, 1), np.int32), np.zeros((1000, 1), np.float32)
    limits = make_limits(256, (ids[3], values[3]), None)
    assert limits is not None
    assert limits.bias_ids.base is None
    assert limits.bias_values.base is None


def test_rows_that_name_the_same_tensors_are_looked_at_once(
    peer: Peer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def count(*given: Any) -> Any:
        made.append(make_limits(*given))
        return made[-1]

    opened = [peer.open(key=str(number)) for number in range(4)]
    monkeypatch.setattr("latentd.requests_extras.make_limits", count)
    masks = np.stack([words(allow(5)), words(allow(6))])
    rows = [
        {**seat(slot), "mask": {"raw": 0, "row": number % 2}} for number, slot in enumerate(opened)
    ]
    reply = peer.ask("step", [masks], rows=rows)
    assert [row["token"] for row in reply["rows"]] == [5, 6, 5, 6]
    assert len(made) == 2
