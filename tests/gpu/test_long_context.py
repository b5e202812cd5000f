"""Long contexts on cuda: finite, repeatable, and the same with graphs and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import promises
import scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu


def run(engine: Engine) -> tuple[list[int | None], list[bytes]]:
    """1100 steps: the token of each, the logits of every 128th and of the last."""
    slot = scenarios.open_slot(engine, [7])
    tokens: list[int | None] = []
    logits = []
    while len(tokens) < 1100:
        tokens += scenarios.stream(engine, slot, min(127, 1099 - len(tokens)))
        logits += scenarios.step(engine, [(slot, None)])
        tokens.append(slot.token)
    assert slot.length == 1101
    scenarios.close(engine, slot)
    return tokens, logits


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_1100_steps_repeat_with_graphs_and_without(start: Start, numerics: str) -> None:
    engine = start(device="cuda", max_ctx=2048, max_slots=2, kv_pages=40, numerics=numerics)
    first = run(engine)
    scenarios.reverse(engine)
    assert run(engine) == first
    engine.backend.eager = True
    assert run(engine) == first


def test_max_ctx_need_not_be_a_multiple_of_the_page(start: Start) -> None:
    promises.the_context_limit_is_kept(start(device="cuda", max_ctx=100, max_slots=1))
