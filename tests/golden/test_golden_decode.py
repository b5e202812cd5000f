"""The cpu backend in float32 against transformers, on tiny models of every served kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import reference_models
from harness import Harness
from latentd.checkpoint import load
from latentd.model.config import ModelConfig
from latentd.model.weights import Weights

CPU = torch.device("cpu")
PROMPT, FORCED = 80, 64  # tokens; together they cross two page boundaries


@dataclass(frozen=True)
class Golden:
    """A reference model beside the same weights read from its checkpoint."""

    reference: Any
    config: ModelConfig
    weights: Weights
    tokens: list[int]

    def harness(self) -> Harness:
        return Harness(self.config, self.weights, CPU, dtype=torch.float32, max_ctx=192)


@pytest.fixture(scope="module", params=list(reference_models.CASES))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    path = tmp_path_factory.mktemp("checkpoint")
    reference = reference_models.build(request.param)
    reference_models.save(reference, path)
    config = ModelConfig.from_dir(path)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (PROMPT + FORCED,), generator=generator).tolist()
    return Golden(reference, config, load(path, config, CPU, torch.float32), tokens)


def test_forced_logits_are_those_of_the_reference(golden: Golden) -> None:
    expected = reference_models.logits(golden.reference, golden.tokens)
    harness = golden.harness()
    first = harness.prompt(0, golden.tokens[:PROMPT]).logits
    rest = harness.force(0, golden.tokens[PROMPT:])
    actual = torch.cat([first[None], rest])
    # 1e-4 is the bound; both sides are float32 and sum in different orders.
    torch.testing.assert_close(actual, expected[PROMPT - 1 :], rtol=0, atol=1e-4)


def test_greedy_generation_is_that_of_the_reference(golden: Golden) -> None:
    prompt = golden.tokens[:20]
    expected = reference_models.greedy(golden.reference, prompt, 48)
    assert golden.harness().generate(0, prompt, 48) == expected


def test_prompt_chunks_of_any_size_give_the_same_bits(golden: Golden) -> None:
    harness = golden.harness()
    whole = harness.prompt(0, golden.tokens)  # more rows than one call of the attention takes
    for slot, chunk in enumerate((33, 64, 143), start=1):
        assert torch.equal(harness.prompt(slot, golden.tokens, chunk).logits, whole.logits)


def test_steps_give_the_bits_of_a_prompt(golden: Golden) -> None:
    harness = golden.harness()
    whole = harness.prompt(0, golden.tokens[:PROMPT])
    stepped = harness.force(1, golden.tokens[:PROMPT])
    assert torch.equal(stepped[-1], whole.logits)


def test_batch_mates_and_padding_change_no_bit(golden: Golden) -> None:
    harness = golden.harness()
    for slot in range(3):
        harness.prompt(slot, golden.tokens[slot : 60 + 3 * slot])
    harness.prompt(3, golden.tokens[:60])
    alone = harness.step([(3, 5)])[0]
    mates = harness.step([(2, 7), (0, 5), (1, 9)], rows=8)[1]
    assert torch.equal(mates.logits, alone.logits)
