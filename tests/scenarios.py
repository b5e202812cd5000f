"""Runs of an engine that both backends' tests compare bit for bit. Works on any `Engine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine_calls import admit_step
from latentd.extras import NO_EXTRAS
from latentd.operations import OpenDone, SamplingParams, StepRequest, StreamRequest, StreamTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd.extras import Extras
    from latentd.operations import Event, OpenRequest

GREEDY = SamplingParams()
NO_STOP: frozenset[int] = frozenset()


def run_all(engine: Engine) -> list[Event]:
    """Run until nothing is left to do."""
    events: list[Event] = []
    while engine.has_work:
        events += engine.run()
    return events


def draw_tokens(count: int, seed: int, vocab_size: int = 256) -> list[int]:
    """Token ids from a seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, count)]


@dataclass(frozen=True)
class Seat:
    """What names a slot; an OpenRequest has it too."""

    slot_id: int
    epoch: int


@dataclass
class Tracked:
    """A slot with its tokens' count, as a client would keep it."""

    request: OpenRequest | Seat
    length: int
    token: int | None
    logits: bytes


def open_slot(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams = GREEDY, salt: str = ""
) -> Tracked:
    """Open a slot and run its prompt."""
    request = engine.admit_open(prompt, sampling, len(prompt) > 0, salt)
    done = run_all(engine)[-1]
    assert isinstance(done, OpenDone)
    logits = b"" if done.logits is None else done.logits.tobytes()
    return Tracked(request, done.context_len, done.token, logits)


def step(
    engine: Engine, rows: Sequence[tuple[Tracked, int | None]], bucket: int | None = None
) -> list[bytes]:
    """Append one token to each, in one launch of `bucket` rows; the logits' bytes of each row."""
    launches = engine.launches
    launches.buckets = engine.info.buckets if bucket is None else (bucket,)
    for slot, token in rows:
        seat = slot.request.slot_id, slot.request.epoch
        admit_step(engine, *seat, slot.length, token, None, True)
    events = run_all(engine)
    launches.buckets = engine.info.buckets
    found = []
    for (slot, _), done in zip(rows, events, strict=True):
        assert isinstance(done, StepRequest)
        assert done.logits is not None
        assert np.isfinite(done.logits).all()
        slot.length, slot.token = done.context_len, done.token
        found.append(done.logits.tobytes())
    return found


def take_back(engine: Engine, slot: Tracked, to: int) -> None:
    """Truncate."""
    engine.truncate(slot.request.slot_id, slot.request.epoch, slot.length, to)
    slot.length, slot.token = to, None


def fork(engine: Engine, slot: Tracked, sampling: SamplingParams | None = None) -> Tracked:
    """Fork."""
    state = engine.fork(slot.request.slot_id, slot.request.epoch, slot.length, sampling)
    seat = Seat(state.slot_id, state.epoch)
    return Tracked(seat, state.context_len, state.token, slot.logits)


def close(engine: Engine, slot: Tracked) -> None:
    """Close the slot."""
    engine.close(slot.request.slot_id, slot.request.epoch)


def start_stream(
    engine: Engine, seat: tuple[int, int], pos: int, steps: int, extras: Extras = NO_EXTRAS
) -> StreamRequest:
    """Queue a stream of `steps` steps."""
    request = StreamRequest(*seat, pos, steps, NO_STOP, steps, extras=extras)
    return engine.admit_stream(request, None, None)


def stream(engine: Engine, slot: Tracked, steps: int) -> list[int]:
    """Tokens of a stream of `steps` steps."""
    seat = slot.request.slot_id, slot.request.epoch
    start_stream(engine, seat, slot.length, steps)
    tokens = []
    for event in run_all(engine):
        assert isinstance(event, StreamTokens)
        assert np.isfinite(event.logprobs).all()
        tokens += event.tokens
        slot.length, slot.token = event.context_len, event.tokens[-1]
    return tokens


def decode(
    engine: Engine, prompt: Sequence[int], forced: Sequence[int], bucket: int | None = None
) -> list[bytes]:
    """Logits of the prompt's last row and of each forced step; the slot is closed afterwards."""
    slot = open_slot(engine, prompt)
    found = [slot.logits]
    for token in forced:
        found += step(engine, [(slot, token)], bucket)
    close(engine, slot)
    engine.slots.check()
    return found


def scramble(engine: Engine, seed: int) -> None:
    """Hand out the free pages in a random order."""
    pool = engine.slots.pool
    order = np.random.default_rng(seed).permutation(pool.free_pages())
    pool.reorder([int(page) for page in order])


def reverse(engine: Engine) -> None:
    """Hand out the free pages in the reverse order."""
    engine.slots.pool.reorder(engine.slots.pool.free_pages()[::-1])


def next_pages(engine: Engine, count: int) -> list[int]:
    """The pages that are handed out next."""
    return engine.slots.pool.free_pages()[:count]


def slab_bytes(engine: Engine) -> NDArray[np.uint8]:
    """A copy of the slab's bytes on the host."""
    import torch

    from latentd.selftest_probe import slab_of

    return slab_of(engine).view(torch.uint8).cpu().numpy().copy()
