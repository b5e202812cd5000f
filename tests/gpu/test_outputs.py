"""Log-probabilities, bias and masks on cuda with graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import output_promises as promises
import scenarios

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


def test_a_prompt_is_scored_with_the_bits_of_its_decoding(start: Start) -> None:
    promises.a_prompt_is_scored_with_the_bits_of_its_decoding(start(device="cuda"), 200)


def test_the_scores_of_a_prompt_do_not_depend_on_the_chunks(start: Start) -> None:
    prompt, found = scenarios.draw_tokens(290, 4), set()
    for chunk, slots in ((512, 4), (100, 64), (64, 2), (7, 1)):
        engine = start(device="cuda", prefill_chunk=chunk, max_slots=slots)
        scores = promises.score_prompt(engine, prompt, 3)
        found.add(b"".join(tensor.tobytes() for tensor in scores.tensors().values()))
    assert len(found) == 1


def test_the_likeliest_tokens_are_those_of_the_logits(start: Start) -> None:
    promises.the_likeliest_tokens_are_those_of_the_logits(start(device="cuda"))


def test_limits_hold_for_their_step_alone(start: Start) -> None:
    promises.limits_hold_for_their_step_alone(start(device="cuda"))


def test_limits_hold_for_a_whole_stream(start: Start) -> None:
    promises.limits_hold_for_a_whole_stream(start(device="cuda"), 40)


def test_a_prompt_of_32_thousand_tokens_has_the_same_scores_in_any_chunks(
    write_config: Callable[..., Path], start: Start
) -> None:
    path, found = write_config(max_position_embeddings=65_536), set()
    for chunk, slots in ((512, 64), (300, 16)):
        engine = start(
            device="cuda", model_dir=path, prefill_chunk=chunk, max_slots=slots, max_ctx=33_000,
            kv_pages=516,
        )  # fmt: skip
        scores = promises.score_prompt(engine, scenarios.draw_tokens(32_768, 4), 1)
        found.add(b"".join(tensor.tobytes() for tensor in scores.tensors().values()))
    assert len(found) == 1
