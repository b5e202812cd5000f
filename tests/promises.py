"""What an engine promises on either backend, as functions that assert it of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import scenarios
from latentd.operations import SamplingParams
from latentd.selftest_probe import slab_of
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.engine import Engine


def page_order_and_dirty_pages_change_no_logit(engine: Engine) -> None:
    """200 steps behind 50 prompt tokens, over four pages: first clean ones in order, then others,
    in reverse and scrambled, that another slot has left dirty. `engine` must be new."""
    prompt, forced = scenarios.draw_tokens(50, 1), scenarios.draw_tokens(200, 2)
    clean = scenarios.next_pages(engine, 4)
    assert not slab_of(engine)[clean].any()
    first = scenarios.decode(engine, prompt, forced)
    arranged: tuple[Callable[[Engine], None], ...] = (
        scenarios.reverse,
        lambda e: scenarios.scramble(e, 3),
    )
    for arrange in arranged:
        arrange(engine)
        scenarios.close(engine, scenarios.open_slot(engine, scenarios.draw_tokens(255, 9)))
        pages = scenarios.next_pages(engine, 4)  # with the other slot's latents in them
        assert pages != clean
        assert all(bool(page.any()) for page in slab_of(engine)[pages])
        assert scenarios.decode(engine, prompt, forced) == first


def a_step_writes_one_row_a_layer(engine: Engine) -> None:
    """Of the whole slab, beside padding rows in the largest bucket."""
    slot = scenarios.open_slot(engine, scenarios.draw_tokens(70, 5))
    before = scenarios.slab_bytes(engine)
    scenarios.step(engine, [(slot, 1)], engine.info.buckets[-1])
    (page,) = engine.slots.table[slot.request.slot_id, 1:2].tolist()
    changed = np.argwhere((scenarios.slab_bytes(engine) != before).any(axis=-1))
    assert changed.tolist() == [[page, layer, 70 % 64] for layer in range(engine.info.layers)]


def far_pages_give_the_same_bits(engine: Engine, steps: int) -> None:
    """Read and appended: on pages 1 and 2, and past every 32-bit offset of 24 layers (an int32
    element offset wraps at page 2428, a uint32 one at 4855). `engine` has 5000 pages."""
    slab, pool = slab_of(engine), engine.slots.pool
    prompt, forced = scenarios.draw_tokens(62, 6), scenarios.draw_tokens(steps, 7)
    outcomes = []
    for pages in ([1, 2], [4999, 4861]):
        pool.reorder(pages + [page for page in pool.free_pages() if page not in pages])
        logits = scenarios.decode(engine, prompt, forced)
        outcomes.append((logits, [slab[page].float().cpu().numpy().tobytes() for page in pages]))
    assert outcomes[0] == outcomes[1]
    assert all(np.frombuffer(written, np.float32).any() for written in outcomes[0][1])


def streams_and_steps_sample_the_same_tokens(
    engine: Engine, temperature: float, steps: int
) -> None:
    """A stream runs ahead and feeds itself on the device's own tokens; steps do not."""
    sampling = SamplingParams(temperature, top_k=50, top_p=0.95, seed=(1 << 64) - 3)
    slot = scenarios.open_slot(engine, [1, 2, 3], sampling)
    streamed = [slot.token, *scenarios.stream(engine, slot, steps)]
    other = scenarios.open_slot(engine, [1, 2, 3], sampling)
    stepped = [other.token]
    for _ in range(steps):
        scenarios.step(engine, [(other, None)])
        stepped.append(other.token)
    assert stepped == streamed


def the_device_table_follows_the_mirror(engine: Engine) -> None:
    """Through claims, a truncate and a close. `engine` has three slots of at least 200 tokens."""
    table = engine.backend.runner.buffers.inputs.block_table  # type: ignore[attr-defined]
    slots = [scenarios.open_slot(engine, scenarios.draw_tokens(130, n)) for n in range(3)]
    assert (table.cpu().numpy() == engine.slots.table).all()
    scenarios.take_back(engine, slots[0], 60)
    scenarios.close(engine, slots[1])
    scenarios.open_slot(engine, [5])
    assert (table.cpu().numpy() == engine.slots.table).all()
    assert (table.cpu().numpy()[slots[0].request.slot_id, 1:] == -1).all()


def the_context_limit_is_kept(engine: Engine) -> None:
    """Of 100 tokens: a prompt of 99 is served, 100 and 101 are not; past it, always one error."""
    for length in (100, 101):
        with pytest.raises(RequestRejected, match="at most 99") as refusal:
            engine.admit_open([1] * length, scenarios.GREEDY, False)
        assert refusal.value.code == "context_full"
    slot = scenarios.open_slot(engine, scenarios.draw_tokens(99, 1))
    scenarios.step(engine, [(slot, None)])
    assert slot.length == 100
    errors = set()
    for _ in range(10):
        with pytest.raises(RequestRejected) as refusal:
            scenarios.step(engine, [(slot, None)])
        errors.add((refusal.value.code, str(refusal.value)))
    assert [code for code, _ in errors] == ["context_full"]
