"""Random calls of clients that reopen, while their daemon is killed and started all the time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fakes import next_token
from latentd_client import Sampling
from lives import Lives

SECONDS = 6.0


class Text:
    """A slot, and the tokens that it must have."""

    def __init__(self, slot: Any, tokens: list[int], seed: int) -> None:
        self.slot = slot
        self.tokens = tokens
        self.seed = seed

    def append(self, token: int | None, sampled: int) -> None:
        """A step has appended a token and sampled another."""
        assert token is not None
        self.tokens.append(token)
        self.expect(sampled)

    def expect(self, sampled: int) -> None:
        assert sampled == next_token(self.tokens, 256, self.seed)


def new(client: Any, draw: random.Random) -> Text:
    tokens = [draw.randrange(256) for _ in range(draw.randrange(1, 150))]
    seed = draw.choice([0, draw.randrange(1, 1000)])
    slot = client.open(tokens, sampling=Sampling(temperature=1.0, seed=seed) if seed else None)
    text = Text(slot, tokens, seed)
    text.expect(slot.token)
    return text


def step(text: Text, draw: random.Random) -> None:
    forced = draw.randrange(256) if text.slot.token is None else draw.choice([None, 5])
    token = text.slot.token if forced is None else forced
    text.append(token, text.slot.step(forced).token)


def stream(text: Text, draw: random.Random) -> None:
    if (token := text.slot.token) is None:
        return
    options: dict[str, Any] = draw.choice([{}, {"credit": 2}, {"draft": "ngram"}])
    leave = draw.randrange(1, 50)
    for count, one in enumerate(text.slot.stream(draw.randrange(1, 40), **options), 1):
        text.append(token, one.token)
        token = one.token
        if count == leave:
            break


def verify(text: Text, draw: random.Random) -> None:
    if (token := text.slot.token) is None:
        return
    right = next_token([*text.tokens, token], 256, text.seed)
    for one in text.slot.verify([draw.choice([right, 1]), 2]).steps:
        text.append(token, one.token)
        token = one.token


def truncate(text: Text, draw: random.Random) -> None:
    to = draw.randrange(1, len(text.tokens) + 1)
    text.slot.truncate(to)
    del text.tokens[to:]


def work(client: Any, draw: random.Random, until: float) -> None:
    """Random calls on up to four slots."""
    texts: list[Text] = []
    while time.monotonic() < until:
        if not texts or (draw.random() < 0.1 and len(texts) < 4):
            texts.append(new(client, draw))
        text = draw.choice(texts)
        draw.choice([step, step, stream, verify, truncate])(text, draw)
        if draw.random() < 0.1 and len(texts) < 4:
            texts.append(Text(text.slot.fork(), list(text.tokens), text.seed))
        if draw.random() < 0.05 or len(text.tokens) > 3000:
            text.slot.close()
            texts.remove(text)
        tokens = [one.slot.token for one in texts]
        if texts and None not in tokens:
            rows = client.step([(one.slot, None) for one in texts])
            for one, token, row in zip(texts, tokens, rows, strict=True):
                one.append(token, row.token)
        for one in texts:
            assert one.slot.context_len == len(one.tokens)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_amid_restarts_give_the_tokens_of_a_daemon_that_never_ended(
    connect: Callable[..., Any], endpoint: str, seed: int
) -> None:
    until, kills = time.monotonic() + SECONDS, random.Random(seed)
    with Lives(endpoint) as lives:

        def kill() -> None:
            while time.monotonic() < until:
                time.sleep(kills.uniform(0.02, 0.3))
                lives.end()
                time.sleep(kills.choice([0.0, 0.0, 0.1]))
                lives.begin()

        killer = threading.Thread(target=kill)
        with connect(endpoint, reopen=True, timeout_s=30.0) as client:
            killer.start()
            try:
                work(client, random.Random(seed), until)
            finally:
                killer.join()
            client.ping()
        assert lives.engine.slots.num_used == 0
