"""The bundled trained model in bf16, on either backend, against transformers and against itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reference_models
import trained_texts
from expanded import ExpandedOps, ForceRoutes, RecordRoutes, flips, ulp_distance
from harness import Harness
from latentd.checkpoint import load
from latentd.demo import model_dir
from latentd.model.config import ModelConfig
from latentd.model.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_kernels.ops import Numerics

    Figure = Callable[[str, object], None]

TEXTS = list(trained_texts.TEXTS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Trained:
    """The bundled model on one device."""

    config: ModelConfig
    weights: Weights
    device: torch.device

    def run(
        self,
        tokens: list[int],
        prompt: int,
        numerics: Numerics = "f32",
        wrap: Callable[[Any], Any] = lambda ops: ops,
    ) -> tuple[torch.Tensor, Any]:
        """Logits of the last prompt token and of every forced one, and the wrapped operations."""
        harness = Harness(
            self.config, self.weights, self.device, numerics=numerics, max_ctx=256, max_slots=1
        )
        harness.ops = wrap(harness.ops)
        first = harness.prompt(0, tokens[:prompt]).logits
        return torch.cat([first[None], harness.force(0, tokens[prompt:])]), harness.ops


@pytest.fixture(scope="module", params=DEVICES)
def trained(request: pytest.FixtureRequest) -> Trained:
    device = torch.device(request.param)
    config = ModelConfig.from_dir(model_dir())
    return Trained(config, load(model_dir(), config, device), device)


@pytest.mark.parametrize("text", TEXTS)
def test_saved_choices_are_those_of_transformers(text: str) -> None:
    made = reference_models.choices(model_dir(), trained_texts.tokens_of(text))
    saved = trained_texts.saved_choices(text)
    assert made["tokens"] == saved["tokens"], "run python tests/trained_texts.py"
    # Another processor may sum in another order and flip a router somewhere, but not everywhere.
    moved = torch.tensor(made["logits"]) - torch.tensor(saved["logits"])
    assert moved.abs().median() < 0.05, "the weights changed: run python tests/trained_texts.py"


@pytest.mark.parametrize("text", TEXTS)
def test_clear_choices_are_those_of_the_reference(
    trained: Trained, text: str, figure: Figure
) -> None:
    saved, prompt = trained_texts.saved_choices(text), 8
    actual, ops = trained.run(saved["tokens"], prompt, wrap=RecordRoutes)
    experts = torch.tensor(saved["experts"])  # [layers, tokens, top_k]
    own = torch.stack(
        [torch.cat(ops.choices[layer :: len(experts)]) for layer in range(len(experts))]
    )
    flipped = (own.sort(-1).values != experts).any(-1)
    best = torch.tensor(saved["best"])[prompt - 1 :]
    logits = torch.tensor(saved["logits"])[prompt - 1 :]
    margin = logits[:, 0] - logits[:, 1]
    clear = (margin > 0.4) | ((margin > 0.15) & ~flipped.any(0)[prompt - 1 :])
    same = actual.argmax(1) == best[:, 0]
    figure("router flips", f"{int(flipped.sum())} of {flipped.numel()}")
    figure("same argmax", f"{int(same.sum())} of {len(same)}, {int(clear.sum())} of them clear")
    figure(
        "deviation of the best five logits, max",
        f"{(actual.gather(1, best) - logits).abs().max():.4f}",
    )
    assert clear.float().mean() > 0.8  # else the texts say nothing
    assert same[clear].all()


@pytest.mark.parametrize("text", TEXTS)
def test_absorbed_attention_is_expanded_attention_within_its_landings(
    trained: Trained, text: str, figure: Figure
) -> None:
    tokens, prompt = trained_texts.tokens_of(text), trained_texts.NUM_TOKENS - 40

    def run(wrap: Callable[[Any], Any]) -> tuple[torch.Tensor, Any]:
        return trained.run(tokens, prompt, "landed", wrap)

    expanded, noted = run(lambda ops: RecordRoutes(ExpandedOps(ops)))
    free, own = run(RecordRoutes)
    forced, _ = run(lambda ops: ForceRoutes(ops, noted.choices))
    best = expanded.topk(5).indices
    wanted = expanded.gather(1, best)
    # All logits of a row come from one landed hidden state, so a row's noise has one size: the
    # unit is the ULP at the RMS of the five, as the bounds of attention are at the RMS of a head.
    # By the ULP of each logit's own size, which is reported too, two expanded chains that only land
    # the scale differently are already up to 7 apart.
    rms = wanted.square().mean(1, keepdim=True).sqrt()
    for name, logits in (("forced", forced), ("unforced", free)):
        for unit, at in (("RMS", rms), ("logit", wanted)):
            ulp = ulp_distance(logits.gather(1, best), wanted, at)
            figure(f"{name}, ULP of the {unit}", f"median {ulp.median():.2f}, max {ulp.max():.2f}")
    figure("router flips", flips(noted.choices, own.choices))
    ulp = ulp_distance(forced.gather(1, best), wanted, rms)
    assert torch.equal(forced.argmax(1), expanded.argmax(1))
    assert ulp.median() <= 1
    assert ulp.max() <= 3
