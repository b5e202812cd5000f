"""Verification over the wire, and drafted streams: both clients against a fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine, fake_logits
from gates import Gate
from latentd_client import (
    Client,
    DeadlineExceeded,
    NgramDrafter,
    ProtocolError,
    RequestRejected,
    Sampling,
)
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Sequence


def follow(engine: FakeEngine, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(engine.expected_token(tokens))
    return tokens[len(prompt) :]


class Oracle:
    """A drafter that knows the text, and spoils the last token of every other draft."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.place, self.drafts = list(text), 0, 0

    def push(self, token: int) -> None:
        assert self.text[self.place] == token
        self.place += 1

    def draft(self, most: int) -> list[int]:
        self.drafts += 1
        guess = self.text[self.place : self.place + most]
        if guess and self.drafts % 2:
            guess[-1] = (guess[-1] + 1) % 256
        return guess


def test_a_right_draft_is_accepted_and_brings_one_token_more(
    client: Any, engine: FakeEngine
) -> None:
    text = follow(engine, [1, 2], 6)
    slot = client.open([1, 2])
    found = slot.verify(text[1:5], logprobs=2)
    assert (found.accepted, found.token, found.context_len) == (4, text[5], 7)
    assert [step.token for step in found.steps] == text[1:6]
    assert [step.context_len for step in found.steps] == [3, 4, 5, 6, 7]
    best = np.argsort(-fake_logits([1, 2, text[0]], 256), kind="stable")[:2]
    assert [top.token for top in found.steps[0].top] == best.tolist()
    assert (slot.token, slot.context_len) == (text[5], 7)
    assert slot.step().token == follow(engine, [1, 2], 7)[6]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_wrong_token_and_all_behind_it_leave_nothing(
    client: Any, engine: FakeEngine, right: int
) -> None:
    text = follow(engine, [1] * 60, 10)
    slot = client.open([1] * 60)
    draft = [*text[1 : 1 + right], (text[1 + right] + 1) % 256, *text[2 + right : 6]]
    found = slot.verify(draft)
    assert (found.accepted, found.token) == (right, text[1 + right])
    assert slot.context_len == 61 + right
    assert engine.slots.pool.num_used == 1
    engine.slots.check()
    assert [step.token for step in slot.stream(4)] == text[2 + right : 6 + right]


def test_an_empty_draft_is_a_step(client: Any, engine: FakeEngine) -> None:
    slot = client.open([1, 2])
    found = slot.verify([], token=9)
    assert (found.accepted, found.context_len) == (0, 3)
    assert found.token == engine.expected_token([1, 2, 9])


def test_nothing_behind_a_stop_token_is_accepted(client: Any, engine: FakeEngine) -> None:
    text = follow(engine, [1, 2], 6)
    slot = client.open([1, 2])
    found = slot.verify(text[1:6], stop=[text[2]])
    assert [step.token for step in found.steps] == text[1:3]
    assert slot.context_len == 4


def test_a_bias_or_mask_holds_for_all_rows_of_a_draft(client: Any) -> None:
    mask = np.zeros(256, np.bool_)
    mask[[7, 40]] = True
    found = client.open([1, 2]).verify([40, 40, 7], mask=mask)
    assert [step.token for step in found.steps] == [40, 40, 40]
    assert found.accepted == 2


def test_what_cannot_be_verified_is_refused(client: Any, engine: FakeEngine) -> None:
    slot = client.open([1] * 4094)
    for draft, code, text in (
        ([1] * 8, "invalid", "the draft has 8 tokens, at most 7"),
        ([1, 256], "invalid", r"draft\[1\] is 256"),
        ([1, 2], "context_full", "take the slot to 4097 tokens, the limit"),
    ):
        with pytest.raises(RequestRejected, match=text) as refusal:
            slot.verify(draft)
        assert refusal.value.code == code
    assert (slot.context_len, slot.verify([5]).context_len) == (4094, 4095)
    with pytest.raises(ProtocolError, match="draft"):
        slot.verify(7)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=5)], ids=str)
def test_a_drafted_stream_has_the_tokens_of_a_plain_one(client: Any, sampling: Any) -> None:
    plain = client.open([1, 2], sampling=sampling)
    text = [plain.token, *(step.token for step in plain.stream(40))]
    slot = client.open([1, 2], sampling=sampling)
    oracle = Oracle(text[1:])
    steps = list(slot.stream(40, draft=oracle))
    assert [step.token for step in steps] == text[1:]
    assert [step.context_len for step in steps] == list(range(3, 43))
    assert (slot.token, slot.context_len) == (plain.token, plain.context_len)
    assert oracle.drafts < 8
    assert slot.step().token == plain.step().token


def test_a_drafted_stream_ends_with_a_stop_token(client: Any, engine: FakeEngine) -> None:
    text = follow(engine, [1, 2], 30)
    stop = text[11]
    slot = client.open([1, 2])
    found = [step.token for step in slot.stream(30, stop=[stop], draft=Oracle(text[1:]))]
    assert found == text[1 : text.index(stop, 1) + 1]
    assert slot.context_len == 2 + len(found)
    assert slot.step().token == follow(engine, [1, 2], 3 + len(found))[1 + len(found)]


def test_a_drafted_stream_ends_behind_a_stop_sequence(client: Any, engine: FakeEngine) -> None:
    text = follow(engine, [1, 2], 30)
    slot = client.open([1, 2])
    drafted = slot.stream(30, stop_sequences=[text[9:11], [256]], draft=Oracle(text[1:]))
    assert [step.token for step in drafted] == text[1:11]
    assert (slot.token, slot.context_len) == (text[10], 12)
    assert slot.step().token == text[11]


def test_who_leaves_a_drafted_stream_is_where_the_last_step_was(
    client: Any, engine: FakeEngine
) -> None:
    text = follow(engine, [1, 2], 30)
    slot = client.open([1, 2])
    for step in slot.stream(30, draft=Oracle(text[1:])):
        if step.context_len == 5:
            break
    assert (slot.token, slot.context_len) == (text[3], 5)
    assert slot.step().token == text[4]
    assert [step.token for step in slot.stream(3)] == text[5:8]


def test_a_drafted_stream_goes_on_without_drafts_where_there_are_no_pages_for_them(
    endpoint: str,
) -> None:
    engine = FakeEngine(max_slots=8, pages=1)
    text = follow(engine, [1] * 55, 10)
    with serving(endpoint, engine), Client(endpoint) as client:
        slot, found = client.open([1] * 55), list[int]()
        drafted = slot.stream(30, draft=Oracle(text[1:]))
        with pytest.raises(RequestRejected) as refusal:
            found.extend(step.token for step in drafted)
        assert refusal.value.code == "no_pages"
        assert (found, slot.context_len) == (text[1:10], 64)


def test_who_gave_a_draft_up_goes_on_from_the_last_step(endpoint: str, engine: FakeEngine) -> None:
    text, gate = follow(engine, [1, 2], 30), Gate(engine)
    with serving(endpoint, engine), Client(endpoint) as client:
        slot = client.open([1, 2])
        drafted = slot.stream(30, draft=Oracle(text[1:]), timeout_s=2.0)
        found = [next(drafted).token for _ in range(7)]
        gate.shut()
        with pytest.raises(DeadlineExceeded):
            next(drafted)
        gate.open()
        assert found == text[1:8]
        assert [step.token for step in slot.stream(5)] == text[8:13]


def test_a_drafted_stream_reaches_the_context_limit_and_then_says_so(
    endpoint: str,
) -> None:
    engine = FakeEngine(max_ctx=20)
    text = follow(engine, [1] * 10, 12)
    with serving(endpoint, engine), Client(endpoint) as client:
        found: list[int] = []
        drafted = client.open([1] * 10).stream(30, draft=Oracle(text[1:]))
        with pytest.raises(RequestRejected) as refusal:
            found.extend(step.token for step in drafted)
        assert refusal.value.code == "context_full"
        assert found == text[1:11]


def test_the_ngram_drafter_shortens_a_text_that_repeats(
    endpoint: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = lambda slot, tokens, seed: (tokens[-1] + 1) % 10  # noqa: E731
    monkeypatch.setattr(engine.fake, "_choose", count)
    with serving(endpoint, engine), Client(endpoint) as client:
        slot = client.open(list(range(10)) * 2)
        found = [step.token for step in slot.stream(50, draft="ngram")]
        assert found == [(1 + n) % 10 for n in range(50)]
        assert engine.fake.launches < 12
        assert client.stats()["accepted"] > 40


def test_a_draft_of_another_kind_is_refused(client: Any) -> None:
    slot = client.open([1])
    for draft in ("model", 3):
        with pytest.raises(ProtocolError, match="must be 'ngram' or a Drafter"):
            list(slot.stream(3, draft=draft))


def test_the_same_verification_again_is_replayed(peer: Peer, engine: FakeEngine) -> None:
    text = follow(engine, [1, 2, 3], 5)
    opened = peer.open()
    first = peer.ask("verify", **seat(opened), draft=[*text[1:3], 0])
    again = peer.ask("verify", **seat(opened), draft=[*text[1:3], 0])
    assert again.pop("replayed")
    assert {**again, "id": 0} == {**first, "id": 0}
    assert first["accepted"] >= 2
    other = peer.ask("verify", **seat(opened), draft=text[1:3])
    assert (other["status"], other["context_len"]) == ("position_conflict", first["context_len"])
    assert peer.ask("step", **seat(opened))["status"] == "position_conflict"


def test_the_same_verification_in_flight_is_answered_twice_and_runs_once(
    peer: Peer, engine: FakeEngine
) -> None:
    opened, gate = peer.open(), Gate(engine)
    gate.shut()
    ids = [peer.send("verify", **seat(opened), draft=[9]) for _ in range(2)]
    other = peer.send("step", **seat(opened))
    gate.open()
    replies = {header["id"]: header for header, _ in (peer.receive() for _ in range(3))}
    assert replies[other]["status"] in ("busy", "position_conflict")
    assert replies[ids[0]]["context_len"] == replies[ids[1]]["context_len"]
    assert replies[ids[1]]["replayed"]


def test_a_verification_whose_slot_is_closed_is_refused(peer: Peer, engine: FakeEngine) -> None:
    opened, gate = peer.open(), Gate(engine)
    gate.shut()
    verify = peer.send("verify", **seat(opened), draft=[9])
    peer.send("close", slot=opened["slot"], epoch=opened["epoch"])
    gate.open()
    replies = {header["id"]: header for header, _ in (peer.receive(), peer.receive())}
    assert replies[verify]["status"] in ("ok", "epoch_gone")
    assert engine.slots.num_used == 0
    engine.slots.check()


def test_the_drafter_takes_what_followed_last_and_goes_on_in_itself() -> None:
    drafter = NgramDrafter([5, 6, 7, 1, 2, 5, 6, 7, 3, 4, 5, 6, 7])
    assert drafter.draft(2) == [3, 4]
    assert drafter.draft(9) == [3, 4, 5, 6, 7, 3, 4, 5, 6]
    drafter.push(9)
    assert drafter.draft(4) == []
    assert NgramDrafter([1, 1, 1, 1]).draft(3) == [1, 1, 1]
    assert NgramDrafter().draft(3) == []
