"""What streams that run ahead, and prompts beside them, promise on either backend."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

import scenarios
from engine_calls import admit_step
from latentd.operations import (
    AttendDone,
    OpenDone,
    SamplingParams,
    StepRequest,
    StreamRequest,
    StreamTokens,
)
from latentd.selftest_probe import slab_of
from latentd_kernels.geometry import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.engine import Engine
    from scenarios import Tracked


@dataclass
class Outcome:
    """All that a run of steps leaves: tokens, the bits of their log-probabilities, the bits of
    what the slot's pages hold, and of the logits of one step more."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    latents: str = ""
    logits: bytes = b""


def a_stream_has_the_bits_of_steps(
    engine: Engine, length: int, steps: int, temperature: float, others: int
) -> None:
    """Alone, and joined by `others` streams and steps that come and go, on other pages."""
    sampling = SamplingParams(temperature, top_k=50, top_p=0.95, seed=11)
    prompt = scenarios.draw_tokens(length, 1)
    slot = scenarios.open_slot(engine, prompt, sampling)
    expected = Outcome()
    for _ in range(steps):
        admit_step(engine, *_seat(slot), slot.length)
        (done,) = scenarios.run_all(engine)
        assert isinstance(done, StepRequest)
        _note(expected, [done.token], [done.logprob])
        slot.length, slot.token = done.context_len, done.token
    _close(engine, slot, expected)
    for mates in (0, others):
        scenarios.scramble(engine, mates)
        beside = _open_mates(engine, mates, length)
        slot = scenarios.open_slot(engine, prompt, sampling)
        found = _stream_beside(engine, slot, steps, beside)
        _close(engine, slot, found)
        for mate in beside:
            scenarios.close(engine, mate)
        engine.slots.check()
        assert found == expected, f"beside {mates} others"


def a_stream_taken_back_has_the_bits_of_steps(
    engine: Engine, length: int, steps: int, others: int
) -> None:
    """The same behind a long prompt that runs once: steps, which a truncate takes back, and a
    stream beside `others` with short prompts, which begins with a named token."""
    slot = scenarios.open_slot(engine, scenarios.draw_tokens(length, 1))
    first = slot.token
    logits = scenarios.step(engine, [(slot, None)])
    stepped = [slot.token]
    for _ in range(steps):
        scenarios.step(engine, [(slot, None)])
        stepped.append(slot.token)
    logits += scenarios.step(engine, [(slot, 5)])
    scenarios.take_back(engine, slot, length)
    assert scenarios.step(engine, [(slot, first)]) == logits[:1]
    scenarios.take_back(engine, slot, length)
    beside = _open_mates(engine, others, PAGE_SIZE)
    found = _stream_beside(engine, slot, steps + 1, beside, first)
    assert found.tokens == stepped
    assert scenarios.step(engine, [(slot, 5)]) == logits[1:]


def _open_mates(engine: Engine, count: int, longest: int) -> list[Tracked]:
    """Slots with prompts of their own, of 1 to `longest` tokens."""
    lengths = [1 + n * 37 % longest for n in range(count)]
    return [
        scenarios.open_slot(engine, scenarios.draw_tokens(length, n))
        for n, length in enumerate(lengths)
    ]


def _stream_beside(
    engine: Engine, slot: Tracked, steps: int, beside: Sequence[Tracked], first: int | None = None
) -> Outcome:
    """Stream a slot, from the token `first` or the one sampled last on, while others join with
    streams of all lengths, leave, and join again; every seventh takes single steps."""
    found, idle = Outcome(), list(beside)
    request = StreamRequest(*_seat(slot), slot.length, steps, scenarios.NO_STOP, steps)
    engine.admit_stream(request, first, None)
    running: dict[object, Tracked] = {}
    for turn in range(100_000):
        for mate in idle[: 1 + turn % 3]:
            idle.remove(mate)
            running[_admit(engine, mate, 1 + turn % 29)] = mate
        for event in engine.run():
            if event.request is request:
                assert isinstance(event, StreamTokens)
                _note(found, event.tokens, event.logprobs)
                slot.length = event.context_len
                if event.end is not None:
                    scenarios.run_all(engine)
                    return found
            elif isinstance(event, StepRequest) or getattr(event, "end", None) is not None:
                assert not isinstance(event, AttendDone)
                mate = running.pop(event.request)
                mate.length = event.context_len  # type: ignore[union-attr]
                if mate.length < engine.info.max_ctx - 30:
                    idle.append(mate)
    raise AssertionError("the stream did not end")


def _admit(engine: Engine, mate: Tracked, steps: int) -> object:
    if mate.request.slot_id % 7 == 6:
        return admit_step(engine, *_seat(mate), mate.length)
    request = StreamRequest(*_seat(mate), mate.length, steps, scenarios.NO_STOP, steps)
    return engine.admit_stream(request, None, None)


def a_step_in_vain_leaves_no_trace(engine: Engine) -> None:
    """A stream stops at the length 64, with a row launched that needs a second page: length, token,
    table, pages and all later bits are those of single steps, and so are those of the slot that
    gets the page next."""
    prompt, steps = scenarios.draw_tokens(55, 3), PAGE_SIZE - 55
    for seed in range(100):
        sampling = SamplingParams(1.0, seed=seed)
        slot = scenarios.open_slot(engine, prompt, sampling)
        tokens = scenarios.stream(engine, slot, steps)
        if tokens[-1] not in tokens[:-1]:
            break
        scenarios.close(engine, slot)
    expected, neighbour = Outcome(), Outcome()
    _close(engine, slot, expected)
    other = scenarios.open_slot(engine, scenarios.draw_tokens(130, 4))
    _close(engine, other, neighbour)
    used = engine.slots.pool.num_used
    slot = scenarios.open_slot(engine, prompt, sampling)
    request = StreamRequest(*_seat(slot), 55, 200, frozenset({tokens[-1]}), 200)
    engine.admit_stream(request, None, None)
    events: list[object] = []
    with patch.object(engine.backend, "launch", wraps=engine.backend.launch) as launch:
        while not (events and getattr(events[-1], "end", None)):
            events += engine.run()
    assert launch.call_count == steps + 1  # the last row in vain
    assert getattr(events[-1], "end", None) == "stop"
    state = engine.slot(*_seat(slot))
    assert (state.context_len, state.token, state.busy) == (PAGE_SIZE, tokens[-1], False)
    assert engine.slots.pool.num_used == used + 1
    slot.length = PAGE_SIZE
    other = scenarios.open_slot(engine, scenarios.draw_tokens(130, 4))
    found, beside = Outcome(), Outcome()
    _close(engine, slot, found)
    _close(engine, other, beside)
    assert (found, beside) == (expected, neighbour)
    engine.slots.check()


def chunks_beside_streams_change_no_bit(engine: Engine, length: int, chunks: Sequence[int]) -> None:
    """A prompt's bits, in chunks of any size, alone and beside streams. `engine` has four slots."""
    scheduler = engine.scheduler
    prompt = scenarios.draw_tokens(length, 5)
    expected = _open_beside(engine, prompt, 0)
    for rows in chunks:
        scheduler.prefill_rows = rows
        scenarios.scramble(engine, rows)
        assert _open_beside(engine, prompt, 3) == expected, f"chunks of {rows}"


def _open_beside(engine: Engine, prompt: Sequence[int], mates: int) -> Outcome:
    streams = []
    slots = [scenarios.open_slot(engine, scenarios.draw_tokens(3 + n, n)) for n in range(mates)]
    for n, mate in enumerate(slots):
        room = engine.info.max_ctx - mate.length
        request = StreamRequest(*_seat(mate), mate.length, room, scenarios.NO_STOP, room)
        streams.append((engine.admit_stream(request, None, None), mate))
        for _ in range(n + 2):
            engine.run()
    opened = engine.admit_open(prompt, scenarios.GREEDY, True)
    done = None
    while done is None:
        done = next((event for event in engine.run() if event.request is opened), None)
    assert isinstance(done, OpenDone)
    assert done.logits is not None
    for request, mate in streams:
        engine.cancel(request)
        scenarios.run_all(engine)
        scenarios.close(engine, mate)
    slot = scenarios.Tracked(opened, len(prompt), done.token, done.logits.tobytes())
    found = Outcome(logprobs=[str(done.token), slot.logits.hex()])
    _close(engine, slot, found)
    return found


def idle_us(engine: Engine, steps: int, others: int) -> dict[str, float]:
    """What the device did nothing between the steps of a stream, which others join and leave: p50
    and p99, of the best of three runs: a host kept from launching in time is not in all of them, a
    bubble of ours is."""
    runs = []
    for _ in range(3):
        slots = [scenarios.open_slot(engine, [1 + n]) for n in range(1 + others)]
        engine.reset_stats()
        _stream_beside(engine, slots[0], steps, slots[1:])
        found = engine.stats()["idle_us"]
        assert isinstance(found, dict)
        runs.append(found)
        for slot in slots:
            scenarios.close(engine, slot)
    return min(runs, key=lambda run: float(run["p99"]))


def _seat(slot: Tracked) -> tuple[int, int]:
    return slot.request.slot_id, slot.request.epoch


def _note(outcome: Outcome, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    outcome.tokens += tokens
    outcome.logprobs += [value.hex() for value in logprobs]


def _close(engine: Engine, slot: Tracked, outcome: Outcome) -> None:
    """Note what the slot holds and one step more, and close it."""
    pages = engine.slots.slots[slot.request.slot_id].pages[: num_pages(slot.length)]
    held = slab_of(engine)[pages].transpose(1, 2).flatten(0, 1)[: slot.length]
    data = held.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    outcome.latents = hashlib.blake2b(data).hexdigest()
    outcome.logits = scenarios.step(engine, [(slot, 5)])[0]
    scenarios.close(engine, slot)
