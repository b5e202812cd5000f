"""What an engine promises of its log-probabilities on either backend, as functions that assert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import scenarios
from engine_calls import admit_step
from latentd.backend_steps import seat_limits
from latentd.extras import Extras
from latentd.limits import make_limits as make
from latentd.operations import OpenDone, SamplingParams, StepRequest, StreamTokens
from latentd_kernels.reference.limits import within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine
    from latentd.extras import PromptScores
    from latentd.limits import Limits

GREEDY = scenarios.GREEDY


def make_limits(seed: int, share: float = 0.1) -> Limits:
    """A bias of some tokens and a mask that allows a share of them."""
    rng = np.random.default_rng(seed)
    allowed = rng.random(256) < share
    allowed[rng.integers(256)] = True
    ids = rng.permutation(256)[:20].astype(np.int32)
    words = np.packbits(allowed, bitorder="little").view(np.uint32)
    limits = make(256, (ids, rng.normal(0, 3, 20).astype(np.float32)), words)
    assert limits is not None
    return limits


def allows(limits: Limits, token: int) -> bool:
    """Whether the mask has the token."""
    assert limits.mask is not None
    return bool(limits.mask[token // 32] >> (token % 32) & 1)


def limits_hold_for_their_step_alone(engine: Engine) -> None:
    """The logits are those of the model, then biased and masked; a row's limits touch no other row
    and no later step."""
    sampling = SamplingParams(1.2, seed=11)
    prompts = [scenarios.draw_tokens(10 + n, n) for n in range(4)]
    slots = [scenarios.open_slot(engine, prompt, sampling) for prompt in prompts]
    free = scenarios.step(engine, [(slot, 7) for slot in slots])
    tokens = [slot.token for slot in slots]
    later = scenarios.step(engine, [(slot, 9) for slot in slots])
    for slot, prompt in zip(slots, prompts, strict=True):
        scenarios.take_back(engine, slot, len(prompt))
    limits = {1: make_limits(1), 2: make_limits(2)}
    for n, slot in enumerate(slots):
        seat = slot.request.slot_id, slot.request.epoch
        asked = Extras(top=3, limits=limits.get(n))
        admit_step(engine, *seat, slot.length, 7, None, True, asked)
    for n, event in enumerate(scenarios.run_all(engine)):
        assert isinstance(event, StepRequest)
        assert event.logits is not None
        assert event.top is not None
        slots[n].length = event.context_len
        raw = np.frombuffer(free[n], np.float32)
        if n not in limits:
            assert (event.token, event.logits.tobytes()) == (tokens[n], free[n])
            continue
        expected = within(raw, seat_limits(limits[n]))
        assert event.logits.tobytes() == expected.tobytes()
        assert allows(limits[n], event.token)
        assert all(allows(limits[n], token) for token in event.top.tokens)
        assert event.top.tokens[0] == int(expected.argmax())
    assert scenarios.step(engine, [(slot, 9) for slot in slots]) == later


def limits_hold_for_a_whole_stream(engine: Engine, steps: int) -> None:
    """And for the first token of an open, but not for the scores of its prompt."""
    prompt, limits = scenarios.draw_tokens(70, 1), make_limits(5)
    scored = score_prompt(engine, prompt, 2)
    request = engine.admit_open(
        prompt, SamplingParams(2.0, seed=4), False, extras=Extras(prompt_top=2, limits=limits)
    )
    done = scenarios.run_all(engine)[-1]
    assert isinstance(done, OpenDone)
    assert done.token is not None
    assert done.prompt_scores is not None
    assert allows(limits, done.token)
    for name, tensor in done.prompt_scores.tensors().items():
        assert tensor.tobytes() == scored.tensors()[name].tobytes()
    seat = request.slot_id, request.epoch
    asked = Extras(limits=make_limits(6))
    scenarios.start_stream(engine, seat, 70, steps, asked)
    found = [t for e in scenarios.run_all(engine) if isinstance(e, StreamTokens) for t in e.tokens]
    assert len(set(found)) > 3
    assert asked.limits is not None
    assert all(allows(asked.limits, token) for token in found)
    scenarios.start_stream(engine, seat, 70 + steps, 50)
    found = [t for e in scenarios.run_all(engine) if isinstance(e, StreamTokens) for t in e.tokens]
    assert not all(allows(asked.limits, token) for token in found)
    engine.close(*seat)


def score_prompt(engine: Engine, prompt: Sequence[int], top: int) -> PromptScores:
    """The scores of a prompt, whose slot is closed again."""
    request = engine.admit_open(prompt, GREEDY, False, extras=Extras(prompt_top=top))
    done = scenarios.run_all(engine)[-1]
    assert isinstance(done, OpenDone)
    assert done.prompt_scores is not None
    engine.close(request.slot_id, request.epoch)
    return done.prompt_scores


def a_prompt_is_scored_with_the_bits_of_its_decoding(engine: Engine, steps: int) -> None:
    """Tokens that a stream has sampled, given as a prompt, have the log-probabilities that the
    stream told, and the likeliest ones beside them that it would have told."""
    asked = Extras(top=5)
    request = engine.admit_open([3, 1], GREEDY, False, extras=asked)
    done = scenarios.run_all(engine)[-1]
    assert isinstance(done, OpenDone)
    assert done.token is not None
    assert done.top is not None
    tokens, logprobs, tops = [done.token], [done.logprob], [done.top]
    seat = request.slot_id, request.epoch
    scenarios.start_stream(engine, seat, 2, steps, asked)
    for event in scenarios.run_all(engine):
        assert isinstance(event, StreamTokens)
        tokens, tops = tokens + event.tokens, tops + event.tops
        logprobs += event.logprobs
    scores = score_prompt(engine, [3, 1, *tokens], 5)
    assert np.isnan(scores.logprobs[0])
    assert (scores.top_tokens[0] == -1).all()
    assert scores.logprobs[2:].tobytes() == np.array(logprobs, np.float32).tobytes()
    assert scores.top_tokens[2:].tolist() == [top.tokens for top in tops]
    likeliest = np.array([top.logprobs for top in tops], np.float32)
    assert scores.top_logprobs[2:].tobytes() == likeliest.tobytes()
    assert [top.tokens[0] for top in tops] == tokens  # it was greedy


def the_likeliest_tokens_are_those_of_the_logits(engine: Engine) -> None:
    """In a batch whose other rows ask for other numbers of them, or for none."""
    sampling = SamplingParams(1.5, seed=9)
    slots = [scenarios.open_slot(engine, scenarios.draw_tokens(20 + n, n)) for n in range(4)]
    for slot, count in zip(slots, (0, 3, 0, 20), strict=True):
        seat = slot.request.slot_id, slot.request.epoch
        admit_step(engine, *seat, slot.length, None, sampling, True, Extras(top=count))
    for event, count in zip(scenarios.run_all(engine), (0, 3, 0, 20), strict=True):
        assert isinstance(event, StepRequest)
        assert event.logits is not None
        if not count:
            assert event.top is None
            continue
        assert event.top is not None
        best = np.argsort(-event.logits, kind="stable")[:count]
        assert event.top.tokens == best.tolist()
        if event.token in event.top.tokens:  # the same bits for the same token
            assert event.top.logprobs[event.top.tokens.index(event.token)] == event.logprob
        exact = event.logits.astype(np.float64)
        exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        np.testing.assert_allclose(event.top.logprobs, exact[best], rtol=0, atol=1e-5)
