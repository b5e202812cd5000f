"""Long contexts and the edges of max_ctx on the cpu backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import promises
import scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine

    Start = Callable[..., Engine]


def test_1100_steps_at_max_ctx_2048_are_finite_and_repeat(start: Start) -> None:
    engine = start(max_ctx=2048, max_slots=2, kv_pages=40)
    runs = []
    for _ in range(2):
        slot = scenarios.open_slot(engine, [7])
        tokens: list[int | None] = []
        logits = []
        while len(tokens) < 1100:
            tokens += scenarios.stream(engine, slot, 127)
            logits += scenarios.step(engine, [(slot, None)])
            tokens.append(slot.token)
        assert slot.length >= 1100
        runs.append((tokens, logits))
        scenarios.close(engine, slot)
        scenarios.reverse(engine)
    assert runs[0] == runs[1]


def test_max_ctx_need_not_be_a_multiple_of_the_page(start: Start) -> None:
    promises.the_context_limit_is_kept(start(max_ctx=100, max_slots=1))
