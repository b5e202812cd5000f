"""Many clients of a daemon whose pages do not suffice for them all: they wait for each other, give
up when that takes too long, and get the tokens of their own texts."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import TYPE_CHECKING

from fakes import FakeEngine, next_token
from gates import wait_until
from latentd_client import Client, DeadlineExceeded, RequestRejected
from serving import serving
from storm_texts import VOCAB

if TYPE_CHECKING:
    from latentd_client import Slot, Step

CLIENTS, SLOTS, PAGES, MAX_CTX = 6, 4, 8, 320
PATIENCE_S = 1.0
"""Of a call: those who have slots may wait for each other."""
GIVEN_UP = ("no_pages", "no_slot", "deadline", "cancelled", "busy", "context_full")


def run(endpoint: str, seed: int, texts: int, cache: bool) -> Counter[str]:
    """Each client writes so many texts; how often what happened. Then nothing is left of them."""
    engine = FakeEngine(max_ctx=MAX_CTX, max_slots=SLOTS, pages=PAGES, cache=cache)
    people = [Member(endpoint, seed * CLIENTS + n, texts) for n in range(CLIENTS)]
    with serving(endpoint, engine, max_waiting=CLIENTS) as running:
        for member in people:
            member.start()
        for member in people:
            member.join()
        wait_until(lambda: engine.slots.num_used == 0)
        waited = running.server._work.waiting.admitted
    pool = engine.slots.pool
    engine.slots.check()
    assert pool.num_free == pool.num_pages
    assert not [member.error for member in people if member.error is not None]
    total = sum((member.total for member in people), Counter[str]())
    return total + Counter({"waited": waited})


class Member(threading.Thread):
    """One client, who has a slot at a time."""

    def __init__(self, endpoint: str, seed: int, texts: int) -> None:
        super().__init__()
        self._endpoint, self._texts = endpoint, texts
        self._draw = random.Random(seed)
        self.total: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write texts; what goes wrong is in `error`."""
        try:
            with Client(self._endpoint, timeout_s=PATIENCE_S) as client:
                for _ in range(self._texts):
                    self._write(client)
        except BaseException as error:
            self.error = error

    def _write(self, client: Client) -> None:
        """One text, until it is long enough or somebody loses patience."""
        prompt = [self._draw.randrange(4)] * self._draw.randrange(1, MAX_CTX - 1)
        try:
            with client.open(prompt) as slot:
                tokens = [*prompt, slot.token or 0]
                for _ in range(self._draw.randrange(1, 6)):
                    self._go_on(slot, tokens)
            self.total["written"] += 1
        except RequestRejected as refusal:
            if refusal.code not in GIVEN_UP:
                raise
            self.total[refusal.code] += 1
        except DeadlineExceeded:
            self.total["late"] += 1

    def _go_on(self, slot: Slot, tokens: list[int]) -> None:
        """A step, or a stream of any length."""
        if self._draw.random() < 0.5:
            self._take(slot.step(), tokens)
            return
        for step in slot.stream(self._draw.randrange(1, 100)):
            self._take(step, tokens)

    def _take(self, step: Step, tokens: list[int]) -> None:
        assert step.context_len == len(tokens)
        assert step.token == next_token(tokens, VOCAB)
        tokens.append(step.token)
        self.total["steps"] += 1
