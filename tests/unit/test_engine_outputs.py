"""Log-probabilities, bias and masks on the cpu backend; tests/gpu has them for cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import output_promises as promises
import scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]


def test_a_prompt_is_scored_with_the_bits_of_its_decoding(start: Start) -> None:
    promises.a_prompt_is_scored_with_the_bits_of_its_decoding(start(), 70)


def test_the_scores_of_a_prompt_do_not_depend_on_the_chunks(start: Start) -> None:
    prompt, found = scenarios.draw_tokens(130, 4), set()
    for chunk, slots in ((512, 4), (100, 3), (64, 2), (7, 1), (1, 4)):
        scores = promises.score_prompt(start(prefill_chunk=chunk, max_slots=slots), prompt, 3)
        found.add(b"".join(tensor.tobytes() for tensor in scores.tensors().values()))
    assert len(found) == 1


def test_a_prompt_of_two_thousand_tokens_has_the_same_scores_in_any_chunks(start: Start) -> None:
    prompt, found = scenarios.draw_tokens(2000, 4), set()
    for chunk, slots in ((512, 4), (100, 3)):
        engine = start(prefill_chunk=chunk, max_slots=slots, max_ctx=2048)
        scores = promises.score_prompt(engine, prompt, 1)
        found.add(b"".join(tensor.tobytes() for tensor in scores.tensors().values()))
    assert len(found) == 1


def test_a_scored_prompt_goes_on_like_any_other(start: Start) -> None:
    engine, prompt = start(prefill_chunk=13), scenarios.draw_tokens(40, 4)
    expected = scenarios.decode(engine, prompt, [5, 6])
    promises.score_prompt(engine, prompt, 0)
    assert scenarios.decode(engine, prompt, [5, 6]) == expected


def test_the_likeliest_tokens_are_those_of_the_logits(start: Start) -> None:
    promises.the_likeliest_tokens_are_those_of_the_logits(start())


def test_limits_hold_for_their_step_alone(start: Start) -> None:
    promises.limits_hold_for_their_step_alone(start())


def test_limits_hold_for_a_whole_stream(start: Start) -> None:
    promises.limits_hold_for_a_whole_stream(start(), 40)
