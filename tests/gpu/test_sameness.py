"""The promise on models of true size: the trained demo model, MoE at DeepSeek-V2-Lite's widths, and
128 heads with query compression. A token's logits are the same bits whatever runs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

import scenarios
from latentd import demo
from latentd.model import published
from latentd.options import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu
LENGTHS = (0, 1, 62, 63, 64, 127, 128, 129, 700, 1023, 1024, 1100)
"""Of the contexts that a step appends to: both sides of page and of split boundaries."""
PROMPT = 700


class Subject(NamedTuple):
    """What the engine is started with."""

    weights: str
    config: dict[str, object] | None  # None: the bundled checkpoint


SUBJECTS = {
    "demo": Subject("checkpoint", None),
    "moe": Subject("random", published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4}),
    "128 heads": Subject(
        "random",
        published.DEEPSEEK_V3
        | {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 2,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "vocab_size": 1024,
            "quantization_config": None,
        },
    ),
}


@pytest.fixture(params=SUBJECTS)
def start_subject(
    request: pytest.FixtureRequest, start: Start, write_config: Callable[..., Path]
) -> Start:
    subject = SUBJECTS[request.param]
    path = demo.model_dir() if subject.config is None else write_config(**subject.config)

    def started(**changes: object) -> Engine:
        return start(
            device="cuda", model_dir=path, weights=subject.weights, max_ctx=2048, **changes
        )

    return started


def test_a_row_has_its_bits_alone_and_in_every_bucket_slot_company_and_mode(
    start_subject: Start,
) -> None:
    engine = start_subject(max_slots=128, kv_pages=1200)
    slots = [
        scenarios.open_slot(engine, scenarios.draw_tokens(LENGTHS[n % len(LENGTHS)], n))
        for n in range(128)
    ]
    alone = [_step_and_take_back(engine, [(slot, n)], 1)[0] for n, slot in enumerate(slots)]
    for bucket in BUCKETS:
        for eager in (False, True):
            engine.backend.eager = eager
            for order in (slots, slots[::-1]):
                chosen = order[:bucket]
                rows = [(slot, slots.index(slot)) for slot in chosen]
                found = _step_and_take_back(engine, rows, bucket)
                unlike = [n for (_, n), bits in zip(rows, found, strict=True) if bits != alone[n]]
                assert not unlike, f"bucket {bucket}, eager {eager}: slots {unlike[:8]}"


def test_a_prompt_has_its_bits_in_chunks_of_any_size_in_steps_and_on_any_pages(
    start_subject: Start,
) -> None:
    prompt = scenarios.draw_tokens(PROMPT, 5)
    found = {}
    for chunk in (512, 100, 64, 7, 1):
        engine = start_subject(max_slots=2, prefill_chunk=chunk)
        if chunk == 64:
            scenarios.scramble(engine, 7)
        found[f"chunks of {chunk}"] = scenarios.open_slot(engine, prompt).logits
    slot = scenarios.open_slot(engine, prompt[:1])
    for token in prompt[1:]:
        logits = scenarios.step(engine, [(slot, token)])[0]
    found["steps"] = logits
    unlike = [name for name, bits in found.items() if bits != found["steps"]]
    assert not unlike


def _step_and_take_back(
    engine: Engine, rows: list[tuple[scenarios.Tracked, int]], bucket: int
) -> list[bytes]:
    """A step of these slots; they have their old lengths afterwards."""
    lengths = [slot.length for slot, _ in rows]
    found = scenarios.step(engine, [(slot, token) for slot, token in rows], bucket)
    for (slot, _), length in zip(rows, lengths, strict=True):
        scenarios.take_back(engine, slot, length)
    return found
