"""What an engine with a prefix cache promises on either backend: a hit changes no bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import scenarios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine


def a_hit_has_the_bits_of_a_cold_prompt(engine: Engine, length: int, steps: int) -> None:
    """The same prompt cold, on pages of prompts, beside their owner, and on pages that steps have
    filled; and `steps` tokens behind it. `engine` has three slots and the cache."""
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(steps, 2)
    cached = (length - 1) // 64 * 64
    cold = _run(engine, prompt, forced, "cold", 0)
    owner = scenarios.open_slot(engine, [*prompt, *scenarios.draw_tokens(100, 3)], salt="a")
    assert _run(engine, prompt, forced, "a", cached) == cold
    scenarios.step(engine, [(owner, 1)])
    scenarios.close(engine, owner)
    scenarios.scramble(engine, 5)
    assert _run(engine, prompt, forced, "a", cached) == cold
    stepped = scenarios.open_slot(engine, prompt[:30], salt="b")
    for token in prompt[30:]:
        scenarios.step(engine, [(stepped, token)])
    scenarios.close(engine, stepped)
    assert _run(engine, prompt, forced, "b", cached) == cold


def a_long_hit_has_the_bits_of_a_cold_prompt(engine: Engine, length: int, steps: int) -> None:
    """Cold and at once again, both kept open; then truncated into the shared pages. `engine` has
    three slots and the cache."""
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(steps, 2)
    first, second = (scenarios.open_slot(engine, prompt) for _ in range(2))
    assert _cached(second) == (length - 1) // 64 * 64
    assert second.logits == first.logits
    for token in forced:
        one, other = scenarios.step(engine, [(first, token), (second, token)])
        assert one == other
    cut = length // 2 + 5
    before = [scenarios.step(engine, [(first, token)])[0] for token in forced]
    for slot in (first, second):
        scenarios.take_back(engine, slot, length + len(forced) if slot is first else cut)
    assert [scenarios.step(engine, [(first, token)])[0] for token in forced] == before
    short = scenarios.open_slot(engine, prompt[:cut], salt="cold")
    for token in forced:
        one, other = scenarios.step(engine, [(short, token), (second, token)])
        assert one == other
    engine.slots.check()


def _run(
    engine: Engine, prompt: Sequence[int], forced: Sequence[int], salt: str, cached: int
) -> list[bytes]:
    """Logits of the prompt's last row and of each forced step; the slot is closed afterwards."""
    slot = scenarios.open_slot(engine, prompt, salt=salt)
    assert _cached(slot) == cached
    found = [slot.logits]
    for token in forced:
        found += scenarios.step(engine, [(slot, token)])
    scenarios.close(engine, slot)
    engine.slots.check()
    return found


def _cached(slot: scenarios.Tracked) -> int:
    request = slot.request
    assert not isinstance(request, scenarios.Seat)
    return request.cached_tokens
