"""Random requests of clients who run the rest of the model, against a plain record of what each
layer of their slots holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from attend_promises import random_rows
from fakes import fake_attention, latent_id
from latentd.operations import AttendDone, SamplingParams

if TYPE_CHECKING:
    from fakes import FakeEngine
    from latentd.attending import AttendRequest
    from latentd.operations import Failed


MOST = 2
"""Slots of theirs, so that room is left for others."""


@dataclass
class Held:
    """What a client knows of its slot: the ids of the latents of each layer, those of the next
    positions included, and the request that has completed its last positions."""

    seat: tuple[int, int]
    layers: list[list[int]]
    length: int = 0
    running: AttendRequest | None = None
    completed: tuple[AttendRequest, np.ndarray] | None = None


@dataclass
class Attenders:
    """Random clients of one engine, who check all results."""

    engine: FakeEngine
    live: list[Held] = field(default_factory=list)
    checked: int = 0

    def act(self, who: int, number: int) -> None:
        """One operation. Raises RequestRejected."""
        held, engine = self.live[who % len(self.live)] if self.live else None, self.engine
        if any(each.running and not engine.slot(*each.seat).busy for each in self.live):
            return  # an event is on its way: the server would let nothing through
        if held is None or (number % 16 == 0 and len(self.live) < MOST):
            opened = engine.admit_open([], SamplingParams(), False)
            layers: list[list[int]] = [[] for _ in range(engine.info.layers)]
            self.live.append(Held((opened.slot_id, opened.epoch), layers))
        elif number % 16 == 1 or len(self.live) > MOST:
            engine.close(*held.seat)
            self.live.remove(held)
        elif number % 16 == 2:
            self._keep(held, engine.truncate(*held.seat, held.length, number % 280))
        elif number % 16 == 3:
            state = engine.fork(*held.seat, held.length, None)
            layers = [layer[: held.length] for layer in held.layers]
            self.live.append(Held((state.slot_id, state.epoch), layers, held.length))
        elif number % 16 == 4 and held.completed is not None:
            again, _ = held.completed
            held.running = engine.admit_attend(again.layer, again.rows, again.q, again.latent)
        elif number % 16 == 5 and held.running is not None:
            engine.cancel(held.running, "cancelled")
        else:
            self._ask(held, who, number)

    def _ask(self, held: Held, who: int, number: int) -> None:
        """Rows of one slot or two, of a layer that mostly is the next one."""
        engine, given = self.engine, [held]
        if number % 3 == 0 and len(self.live) > 1:
            given.append(self.live[(who + 1) % len(self.live)])
        count = 1 + number % 2
        end = held.length + count
        missing = next((i for i, ids in enumerate(held.layers) if len(ids) < end), 0)
        layer = number % engine.info.layers if number % 5 == 0 else missing
        rows = [(*each.seat, each.length + row) for each in given for row in range(count)]
        q, latent = random_rows(engine, len(rows), number)
        request = engine.admit_attend(layer, rows, q, latent)
        for each in given:
            assert not layer or len(each.layers[layer - 1]) >= each.length + count
            each.running = request

    def forget_what_lies_ahead(self) -> None:
        """The engine has only what was complete, and knows what completed it."""
        for held in self.live:
            for ids in held.layers:
                del ids[held.length :]

    def take(self, event: AttendDone | Failed) -> None:
        """Check an event against the records of its slots, if those are still open."""
        runs = [held for held in self.live if held.running is event.request]
        for held in runs:
            held.running = None
            if isinstance(event, AttendDone):
                self._check(held, event)

    def _check(self, held: Held, done: AttendDone) -> None:
        request, info = done.request, self.engine.info
        rows = [i for i, row in enumerate(request.rows) if row[:2] == held.seat]
        first = request.rows[rows[0]][2]
        if held.completed is not None and held.completed[0].rows == request.rows:
            assert np.array_equal(held.completed[1], done.o)
            return
        ids = held.layers[request.layer]
        ids[first : first + len(rows)] = [latent_id(request.latent[row]) for row in rows]
        for place, row in enumerate(rows):
            expected = fake_attention(request.q[row], ids[: first + place + 1], request.layer, info)
            assert np.array_equal(done.o[row], expected)
            self.checked += 1
        if request.layer == info.layers - 1:
            self._keep(held, first + len(rows))
            held.completed = request, done.o
        assert [done.lengths[row] for row in rows] == [held.length] * len(rows)

    @staticmethod
    def _keep(held: Held, length: int) -> None:
        """Nothing is held any more but the first positions."""
        held.length, held.completed = length, None
        for ids in held.layers:
            del ids[length:]
