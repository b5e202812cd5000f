"""What two engines promise of a snapshot that goes from one to the other: no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import scenarios
from latentd import snapshot
from latentd.operations import SamplingParams
from latentd.records import SlotRecord
from latentd.sessions import Sessions
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from latentd.engine import Engine


def own(slots: Iterable[scenarios.Tracked]) -> Sessions:
    """Sessions of which one owns these slots."""
    sessions = Sessions(60, 60)
    session = sessions.create(0.0)
    for slot in slots:
        seat = slot.request.slot_id, slot.request.epoch
        session.slots[seat] = SlotRecord(*seat)
    return sessions


def hand_over(
    source: Engine, slots: Iterable[scenarios.Tracked], target: Engine, folder: Path
) -> Sessions:
    """Save one engine's slots and restore them in another one."""
    snapshot.save(source, own(slots), folder / "saved")
    sessions = Sessions(60, 60)
    assert snapshot.restore(target, sessions, folder / "saved") is not None
    target.slots.check()
    return sessions


def make_dirty(target: Engine, length: int) -> None:
    """Leave other tokens in the pages that are handed out next, in another order."""
    scenarios.close(target, scenarios.open_slot(target, scenarios.draw_tokens(length, 9)))
    scenarios.scramble(target, 5)


def restored_slots_go_on_with_the_same_bits(
    source: Engine, target: Engine, folder: Path, length: int, steps: int
) -> None:
    """A slot, a fork of it that went on, one that was cut back into a page that it shares, and one
    whose copy of a page no step has made yet; both engines go on with the same forced tokens."""
    make_dirty(target, length)
    prompt = scenarios.draw_tokens(length, 1)
    slot = scenarios.open_slot(source, prompt)
    fork = scenarios.fork(source, slot)
    scenarios.step(source, [(fork, 7)])
    cut = scenarios.fork(source, fork)
    scenarios.take_back(source, cut, length // 2)
    slots = (slot, fork, cut, scenarios.fork(source, fork))
    hand_over(source, slots, target, folder)
    forced = scenarios.draw_tokens(steps, 2)
    found, went_on = (
        [scenarios.step(engine, [(each, token) for each in copies]) for token in forced]
        for engine, copies in (
            (target, [scenarios.Tracked(s.request, s.length, s.token, b"") for s in slots]),
            (source, slots),
        )
    )
    assert found == went_on
    for engine in (source, target):
        for each in slots:
            scenarios.close(engine, each)
        assert engine.slots.pool.num_used == 0
        engine.slots.check()
    fresh = scenarios.decode(target, prompt, forced)
    assert fresh[1:] == [row[0] for row in found]


def sampled_streams_go_on(source: Engine, target: Engine, folder: Path) -> None:
    """What a stream draws after the restart is what it would have drawn: seed and last token."""
    hot = SamplingParams(1.3, seed=77)
    slot = scenarios.open_slot(source, scenarios.draw_tokens(100, 6), hot)
    scenarios.stream(source, slot, 20)
    copy = scenarios.Tracked(slot.request, slot.length, slot.token, b"")
    hand_over(source, [slot], target, folder)
    state = target.slot(slot.request.slot_id, slot.request.epoch)
    assert (state.seed, state.token, state.context_len) == (77, slot.token, slot.length)
    assert scenarios.stream(target, copy, 60) == scenarios.stream(source, slot, 60)


def restored_pages_serve_as_prefixes(source: Engine, target: Engine, folder: Path) -> None:
    """Both engines have a prefix cache: a prompt begins on the pages of a restored slot."""
    prompt, salted = scenarios.draw_tokens(200, 1), scenarios.draw_tokens(200, 2)
    slots = [
        scenarios.open_slot(source, prompt),
        scenarios.open_slot(source, [*prompt[:150], 1]),
        scenarios.open_slot(source, salted, salt="s"),
    ]
    used = source.slots.pool.num_used
    assert used < sum(num_pages(slot.length) for slot in slots)
    hand_over(source, slots, target, folder)
    assert target.slots.pool.num_used == used
    again = scenarios.open_slot(target, prompt)
    assert target.slots.slots[again.request.slot_id].length == 200
    assert target.slots.pool.num_used == used + 1
    assert again.logits == slots[0].logits
    scenarios.close(target, again)
    stranger = scenarios.open_slot(target, salted)
    assert target.slots.pool.num_used == used + num_pages(200)
    assert stranger.logits == slots[2].logits
