"""What two engines promise of a sequence that goes from one to the other: no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import scenarios
from latentd.operations import SamplingParams, StreamTokens
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd.engine_transfer import Arrival


def read_all(engine: Engine, slot: scenarios.Tracked, each: int) -> list[NDArray[np.uint8]]:
    """The slot's pages in pieces of `each`."""
    seat = slot.request.slot_id, slot.request.epoch
    found, transfers = engine.transfers.look(*seat, slot.length), engine.transfers
    count = num_pages(slot.length)
    return [
        transfers.read(found, first, min(each, count - first)) for first in range(0, count, each)
    ]


def begin(source: Engine, slot: scenarios.Tracked, target: Engine) -> Arrival:
    """Begin to adopt a slot of another engine."""
    found = source.slots.slots[slot.request.slot_id]
    assert found.sampling is not None
    tokens = np.array(found.tokens[: found.length], np.int32)
    return target.transfers.begin(tokens, found.token, found.sampling, "")


def commit(target: Engine, arrival: Arrival) -> scenarios.Tracked:
    """Make a slot of it."""
    slot = target.transfers.commit(arrival)
    target.slots.check()
    return scenarios.Tracked(scenarios.Seat(slot.slot_id, slot.epoch), slot.length, slot.token, b"")


def hand_over(
    source: Engine, slot: scenarios.Tracked, target: Engine, each: int = 3
) -> scenarios.Tracked:
    """Adopt a slot of another engine, the last piece first."""
    arrival, first = begin(source, slot, target), 0
    pieces = []
    for data in read_all(source, slot, each):
        pieces.append((first, data))
        first += len(data)
    for first, data in reversed(pieces):
        target.transfers.put(arrival, first, data)
    return commit(target, arrival)


def an_adopted_slot_has_the_bits_of_its_source(
    source: Engine, target: Engine, length: int, steps: int
) -> None:
    """A prompt and three steps, then over to the other engine, whose pages lie elsewhere and are
    dirty; both go on with the same forced tokens, and so does a fresh prompt there."""
    for engine in (source, target):
        stranger = scenarios.open_slot(engine, scenarios.draw_tokens(length, 9))
        scenarios.close(engine, stranger)
    scenarios.scramble(target, 5)
    prompt, forced = scenarios.draw_tokens(length, 1), scenarios.draw_tokens(steps, 2)
    slot = scenarios.open_slot(source, prompt)
    begun = [scenarios.step(source, [(slot, token)])[0] for token in (7, 8, 9)]
    adopted = hand_over(source, slot, target)
    assert (adopted.length, adopted.token) == (slot.length, slot.token)
    other = scenarios.open_slot(target, scenarios.draw_tokens(9, 3))
    found = [scenarios.step(target, [(other, token), (adopted, token)])[1] for token in forced]
    went_on = [scenarios.step(source, [(slot, token)])[0] for token in forced]
    for engine, seat in ((target, adopted), (target, other), (source, slot)):
        scenarios.close(engine, seat)
    assert found == went_on
    fresh = scenarios.decode(target, prompt, [7, 8, 9, *forced])
    assert fresh[1:] == begun + found
    assert target.slots.pool.num_used == source.slots.pool.num_used == 0


def a_stream_goes_on_in_another_engine(source: Engine, target: Engine) -> None:
    """Sampled tokens after the move are those that the source would have drawn, there and back,
    from a fork whose copies no step has made yet."""
    hot = SamplingParams(1.3, seed=77)
    slot = scenarios.open_slot(source, scenarios.draw_tokens(100, 6), hot)
    scenarios.stream(source, slot, 20)
    moved = hand_over(source, scenarios.fork(source, slot), target)
    assert target.slot(moved.request.slot_id, moved.request.epoch).seed == 77
    drawn = scenarios.stream(target, moved, 30)
    back = hand_over(target, moved, source)
    drawn += scenarios.stream(source, back, 30)
    assert drawn == scenarios.stream(source, slot, 60)


def what_lies_behind_the_last_token_does_not_travel(source: Engine, target: Engine) -> None:
    """The source has rows of tokens that were taken back; what is sent is zero there. And a
    sender who fills them with NaNs reaches nobody."""
    length, prompt = 70, scenarios.draw_tokens(130, 4)
    slot = scenarios.open_slot(source, prompt)
    scenarios.take_back(source, slot, length)
    (data,) = read_all(source, slot, 9)
    shape = (source.info.layers, PAGE_SIZE, -1)
    assert not data[-1].reshape(shape)[:, length % PAGE_SIZE :].any()
    assert data[-1].reshape(shape)[:, : length % PAGE_SIZE].any()
    dirty = data.copy()
    dirty[-1].reshape(shape)[:, length % PAGE_SIZE :] = 0xFF
    arrival = begin(source, slot, target)
    target.transfers.put(arrival, 0, dirty)
    adopted = commit(target, arrival)
    (again,) = read_all(target, adopted, 9)
    assert (again == data).all()
    seat = target.slots.slots[adopted.request.slot_id]
    assert (target.backend.read_pages(seat.pages) == data).all()
    forced = scenarios.draw_tokens(20, 5)
    found = [scenarios.step(target, [(adopted, token)])[0] for token in forced]
    assert found == scenarios.decode(source, prompt[:length], forced)[1:]


def adoptions_beside_a_stream_change_none_of_its_tokens(source: Engine, target: Engine) -> None:
    """Pieces go in and out between the launches of a stream that runs ahead, an adoption is given
    up in between, and its pages go to another one."""
    slot = scenarios.open_slot(source, scenarios.draw_tokens(200, 7))
    runner = scenarios.open_slot(target, scenarios.draw_tokens(50, 8))
    fork = scenarios.fork(target, runner)
    expected = scenarios.stream(target, fork, 60)
    scenarios.close(target, fork)
    pieces = read_all(source, slot, 1)
    request = scenarios.start_stream(
        target, (runner.request.slot_id, runner.request.epoch), runner.length, 60
    )
    tokens: list[int] = []
    adopted: list[scenarios.Tracked] = []
    while target.has_work:
        target.launch()
        arrival = begin(source, slot, target)
        for first, data in enumerate(pieces):
            target.transfers.put(arrival, first, data)
            for event in target.run():
                assert isinstance(event, StreamTokens)
                assert event.request is request
                tokens += event.tokens
            if first == 2 and len(adopted) == 2:
                target.transfers.drop(arrival)
                break
        else:
            adopted.append(commit(target, arrival))
            if len(adopted) == 2:
                (again,) = read_all(target, adopted[0], 9)
                assert (again == np.concatenate(pieces)).all()
    assert tokens == expected
    forced = scenarios.draw_tokens(5, 3)
    went_on = [scenarios.step(source, [(slot, token)])[0] for token in forced]
    for seat in adopted:
        assert [scenarios.step(target, [(seat, token)])[0] for token in forced] == went_on


def a_page_that_a_copy_in_flight_still_goes_to_can_be_adopted_into(engine: Engine) -> None:
    """A fork is closed before its copy was made, and an adoption gets its page; the copy is in
    flight, in front of a stream's step, when the page's piece comes."""
    source = scenarios.open_slot(engine, scenarios.draw_tokens(30, 1))
    other = scenarios.open_slot(engine, scenarios.draw_tokens(30, 2))
    runner = scenarios.open_slot(engine, scenarios.draw_tokens(9, 3))
    (data,) = read_all(engine, other, 1)
    fork = scenarios.fork(engine, source)
    (page,) = engine.slots.slots[fork.request.slot_id].pages
    scenarios.close(engine, fork)
    arrival = begin(engine, other, engine)
    assert arrival.slot.pages == [page]
    seat = runner.request.slot_id, runner.request.epoch
    scenarios.start_stream(engine, seat, runner.length, 3)
    engine.launch()
    engine.transfers.put(arrival, 0, data)
    adopted = commit(engine, arrival)
    scenarios.run_all(engine)
    assert scenarios.step(engine, [(adopted, 5)]) == scenarios.step(engine, [(other, 5)])
