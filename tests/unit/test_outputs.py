"""Log-probabilities and changed sampling, over the wire: both clients against a fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine, fake_logits
from latentd.operations import SamplingParams
from latentd_client import Client, RequestRejected, Sampling, TokenLogprob, protocol
from latentd_client._request import Call
from latentd_client._stream import StreamReader
from serving import Peer, seat, serving

if TYPE_CHECKING:
    pass

PROMPT = list(range(1, 301))


def likeliest(tokens: list[int], count: int) -> tuple[TokenLogprob, ...]:
    logits = fake_logits(tokens, 256)
    best = np.argsort(-logits, kind="stable")[:count]
    return tuple(TokenLogprob(int(token), float(logits[token])) for token in best)


def test_the_likeliest_tokens_come_beside_each_token(client: Any) -> None:
    slot = client.open([1, 2], logprobs=3)
    tokens = [1, 2]
    assert slot.top == likeliest(tokens, 3)
    tokens.append(slot.token)
    step = slot.step(logprobs=20)
    assert step.top == likeliest(tokens, 20)
    assert slot.step(9).top == ()
    tokens += [step.token, 9][1:]
    (row,) = client.step([(slot, 7)], logprobs=2)
    assert row.top == likeliest([*tokens, 7], 2)


def test_the_tokens_of_a_stream_have_theirs(client: Any) -> None:
    slot = client.open([1, 2])
    tokens = [1, 2, slot.token]
    for step in slot.stream(5, logprobs=2):
        assert step.top == likeliest(tokens, 2)
        tokens.append(step.token)
    assert len(tokens) == 8


@pytest.mark.parametrize("top", [0, 2])
def test_every_token_of_a_prompt_has_its_log_probability(client: Any, top: int) -> None:
    prompt = [token % 256 for token in PROMPT]
    found = client.open(prompt, prompt_logprobs=top).prompt_logprobs
    assert found.logprobs.shape == (300,)
    assert found.top_tokens.shape == found.top_logprobs.shape == (300, top)
    assert np.isnan(found.logprobs[0])
    for row in (1, 127, 128, 129, 299):
        assert found.logprobs[row] == fake_logits(prompt[:row], 256)[prompt[row]]
        pairs = zip(found.top_tokens[row], found.top_logprobs[row], strict=True)
        assert tuple(pairs) == likeliest(prompt[:row], top)


def test_a_prompt_of_nothing_or_one_token_has_nothing_before_it(client: Any) -> None:
    assert client.open([], prompt_logprobs=1).prompt_logprobs.logprobs.shape == (0,)
    assert np.isnan(client.open([5], prompt_logprobs=1).prompt_logprobs.logprobs).all()
    assert client.open([5]).prompt_logprobs is None


def test_a_scored_prompt_is_computed_though_its_pages_are_there(endpoint: str) -> None:
    prompt = [token % 256 for token in PROMPT]
    with serving(endpoint, FakeEngine(cache=True)), Client(endpoint) as client:
        client.open(prompt)
        assert client.open(prompt).cached_tokens == 256
        scored = client.open(prompt, prompt_logprobs=1)
        assert scored.cached_tokens == 0
        assert scored.prompt_logprobs is not None
        assert np.isfinite(scored.prompt_logprobs.logprobs[1:]).all()
        assert client.open(prompt).cached_tokens == 256


def test_log_probabilities_of_a_prompt_that_fit_into_no_frame_are_refused_at_once(
    endpoint: str, engine: FakeEngine
) -> None:
    with serving(endpoint, engine, max_frame_bytes=4000), Client(endpoint) as client:
        assert client.open([1] * 1000, prompt_logprobs=1).context_len == 1000
        with pytest.raises(RequestRejected, match="4004 bytes a frame, at most 4000") as refusal:
            client.open([1] * 1001, prompt_logprobs=1)
        assert refusal.value.code == "too_large"
        with pytest.raises(RequestRejected, match="4040 bytes a frame"):
            client.open([1] * 505, prompt_logprobs=2)
        assert engine.slots.num_used == 1


def test_more_than_twenty_are_refused(client: Any) -> None:
    with pytest.raises(RequestRejected, match="logprobs is 21, must be 0 to 20") as refusal:
        client.open([1], logprobs=21)
    assert refusal.value.code == "invalid"


def test_sampling_holds_from_the_step_on_that_brings_it(client: Any, engine: FakeEngine) -> None:
    slot = client.open([1, 2], sampling=Sampling(seed=5))
    tokens, hot = [1, 2, slot.token], SamplingParams(1.0, seed=5)
    slot.step(sampling=Sampling(temperature=1.0))
    tokens.append(engine.expected_token(tokens, hot))
    assert slot.token == tokens[-1]
    for step in slot.stream(3):
        tokens.append(engine.expected_token(tokens, hot))
        assert step.token == tokens[-1]
    (last,) = slot.stream(1, sampling=Sampling())
    assert last.token == engine.expected_token(tokens)
    assert slot.step().token == engine.expected_token([*tokens, last.token])


def test_a_refused_step_leaves_the_sampling_as_it_was(peer: Peer, engine: FakeEngine) -> None:
    opened = peer.open()
    wrong = {**seat(opened), "pos": 9, "sampling": {"temperature": 1.0}}
    assert peer.ask("step", **wrong)["status"] == "position_conflict"
    assert peer.ask("step", **seat(opened), token=4)["token"] == engine.expected_token([1, 2, 3, 4])


def test_a_replayed_open_brings_the_prompts_log_probabilities_again(peer: Peer) -> None:
    found = []
    for _ in range(2):
        peer.send("open", key="k", prompt=[4, 5, 6], prompt_logprobs=1, logits=True)
        header, raw = peer.receive()
        names = ("logits", "prompt_logprobs", "prompt_top_tokens", "prompt_top_logprobs")
        found.append([protocol.pick_raw(header[name], raw) for name in names])
    for first, again in zip(*found, strict=True):
        np.testing.assert_array_equal(first, again)
    changed = peer.ask("open", key="k", prompt=[4, 5, 6], prompt_logprobs=2, logits=True)
    assert changed["status"] == "invalid"


def test_a_step_that_asks_for_other_log_probabilities_is_another_one(peer: Peer) -> None:
    opened = peer.open()
    first = peer.ask("step", **seat(opened), token=9, logprobs=2)
    again = peer.ask("step", **seat(opened), token=9, logprobs=2)
    assert again["replayed"]
    assert again["top_tokens"] == first["top_tokens"]
    other = peer.ask("step", **seat(opened), token=9, logprobs=3)
    assert other["status"] == "position_conflict"


def test_a_stream_that_is_read_again_has_its_likeliest_tokens_again(peer: Peer) -> None:
    opened = peer.open()
    frames = []
    for _ in range(2):
        peer.send("stream", **seat(opened), max_steps=3, credit=9, logprobs=1)
        tops: list[list[int]] = []
        while True:
            header = peer.receive()[0]
            tops += header["top_tokens"]
            if not header.get("more"):
                break
        frames.append(tops)
    assert frames[0] == frames[1]
    assert len(frames[0]) == 3


def test_a_late_reader_gets_long_log_probabilities_in_frames_that_fit(
    endpoint: str, engine: FakeEngine
) -> None:
    with serving(endpoint, engine, credits=4000), Client(endpoint) as client:
        slot = client.open([1])
        for _ in range(2):
            fields = {
                "session": client._session.calls.session,
                **slot.seat,
                "pos": 1,
                "max_steps": 4000,
            }
            call = Call("stream", {**fields, "credit": 4000, "logprobs": 20}, is_kept=True)
            reader = StreamReader(4000, call)
            reader.take(client._session.move(call, 60.0))  # type: ignore[arg-type]
            while reader.end is None:
                reader.take(client._session.move(reader.pending, 60.0))  # type: ignore[arg-type]
            assert len(reader.ready) == 4000
            assert all(len(step.top) == 20 for step in reader.ready)


def test_prompt_logprobs_is_an_unknown_field_beside_a_token_and_not_looked_at(peer: Peer) -> None:
    opened = peer.open([1, 2])
    step = peer.ask("step", **seat(opened), prompt_logprobs=["a"] * 1000)
    again = peer.ask("step", **seat(opened))
    assert (again.pop("replayed"), again.pop("id"), step.pop("id")) == (True, 4, 3)
    assert again == step
