"""What an engine promises of forks and truncates on either backend: no bit of any logit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import scenarios
from latentd.operations import SamplingParams
from latentd.selftest_probe import slab_of
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine


def forks_have_the_bits_of_a_fresh_prompt(engine: Engine, length: int, steps: int) -> None:
    """Two forks of one prompt, one of them beside its source and a stranger; the source goes
    another way first, then is closed. `engine` has four slots."""
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(steps, 2)
    source = scenarios.open_slot(engine, prompt)
    used = engine.slots.pool.num_used
    first, second = scenarios.fork(engine, source), scenarios.fork(engine, source)
    assert engine.slots.pool.num_used - used == 2 * (length % PAGE_SIZE > 0)
    for token in scenarios.draw_tokens(3, 3):
        scenarios.step(engine, [(source, token)])
    stranger = scenarios.open_slot(engine, scenarios.draw_tokens(5, 4))
    beside = [
        scenarios.step(engine, [(source, 7), (first, token), (stranger, token)])[1]
        for token in forced
    ]
    for slot in (source, stranger, first):
        scenarios.close(engine, slot)
    scenarios.scramble(engine, 5)
    alone = _force(engine, second, forced)
    scenarios.close(engine, second)
    fresh = scenarios.decode(engine, prompt, forced)
    assert fresh[0] == source.logits
    assert fresh[1:] == beside == alone


def a_truncated_slot_goes_on_like_a_fresh_prompt(engine: Engine, length: int, steps: int) -> None:
    """Cut back to `length` from 100 tokens more, prompt and decoded ones; the tail leaves no trace.
    And again by all the forced steps. `engine` has two slots."""
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(steps, 2)
    slot = scenarios.open_slot(engine, prompt + scenarios.draw_tokens(90, 3))
    _force(engine, slot, scenarios.draw_tokens(10, 4))
    found = []
    for _ in range(2):
        scenarios.take_back(engine, slot, length)
        assert engine.slots.pool.num_used == num_pages(length)
        found.append(_force(engine, slot, forced))
    scenarios.close(engine, slot)
    fresh = scenarios.decode(engine, prompt, forced)[1:]
    assert found == [fresh, fresh]


def a_truncated_fork_writes_into_no_page_of_others(engine: Engine, length: int) -> None:
    """A fork is cut back into a page that it shares, and goes on there: it gets a copy, and the
    pages of the source keep their bytes. `engine` has three slots, `length` is past two pages."""
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(70, 2)
    cut = PAGE_SIZE + 9
    source = scenarios.open_slot(engine, prompt)
    fork = scenarios.fork(engine, source)
    pages = engine.slots.slots[source.request.slot_id].pages[: length // PAGE_SIZE]
    before = slab_of(engine)[pages].clone()
    scenarios.take_back(engine, fork, cut)
    found = _force(engine, fork, forced)
    assert bool((slab_of(engine)[pages] == before).all())
    went_on = _force(engine, source, forced)
    table = engine.backend.runner.buffers.inputs.block_table  # type: ignore[attr-defined]
    assert (table.cpu().numpy() == engine.slots.table).all()
    for slot in (source, fork):
        scenarios.close(engine, slot)
    assert found == scenarios.decode(engine, prompt[:cut], forced)[1:]
    assert went_on == scenarios.decode(engine, prompt, forced)[1:]
    engine.slots.check()


def samples_of_one_prompt_differ_and_repeat(engine: Engine) -> None:
    """Each fork draws by its own seed, from its first token on when the prompt's last token is left
    to it; a fork with the source's seed goes on like the source. `engine` has four slots."""
    hot = [SamplingParams(1.5, seed=seed) for seed in (1, 2, 3)]
    prompt = scenarios.draw_tokens(100, 6)
    source = scenarios.open_slot(engine, prompt[:-1])
    drawn = []
    for sampling in hot:
        fork = scenarios.fork(engine, source, sampling)
        scenarios.step(engine, [(fork, prompt[-1])])
        drawn.append([fork.token, *scenarios.stream(engine, fork, 20)])
        scenarios.close(engine, fork)
        fresh = scenarios.open_slot(engine, prompt, sampling)
        assert [fresh.token, *scenarios.stream(engine, fresh, 20)] == drawn[-1]
        fork = scenarios.fork(engine, fresh)
        again = scenarios.fork(engine, fork)
        assert scenarios.stream(engine, fork, 9) == scenarios.stream(engine, again, 9)
        for slot in (fresh, fork, again):
            scenarios.close(engine, slot)
    assert len({tokens[0] for tokens in drawn}) == len(hot)


def _force(engine: Engine, slot: scenarios.Tracked, tokens: Sequence[int]) -> list[bytes]:
    """Logits after each of these tokens."""
    return [scenarios.step(engine, [(slot, token)])[0] for token in tokens]
