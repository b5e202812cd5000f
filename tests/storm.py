"""Random calls of a client on several slots, each made again until its reply arrives.

What is called depends on the seed alone, not on what is lost, so that two storms of one seed end
with the same texts. Every token is compared with the model's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar

from fakes import FakeEngine, next_token
from latentd_client import Client, ConnectionLost, DeadlineExceeded, RequestRejected, Sampling
from lossy import lossy, num_pending
from serving import serving
from storm_texts import VOCAB, Text

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")

MAX_TEXT = 300
"""A longer one makes place for another."""
CALLS = {"step": 8, "named_step": 3, "rows": 4, "stream": 3, "left_stream": 3, "drafts": 2,
         "verify": 4, "truncate": 2, "fork": 1, "reopen": 1}  # fmt: skip
"""How often each is drawn."""


def run(
    endpoint: str, seed: int, steps: int, probability: float,
    connect: Callable[..., Any] = Client,
) -> tuple[int, list[list[int]]]:  # fmt: skip
    """A storm on five slots of a fake engine, each of whose replies is lost with a probability; how
    many were, and the texts, which are what the daemon has. Then nothing is left of it. `connect`
    makes the client, a `Blocking` one for an AsyncClient."""
    engine, draw = FakeEngine(max_ctx=512), random.Random(seed)
    with serving(endpoint, engine), connect(endpoint) as client:
        wire = lossy(client, lambda message: draw.random() < probability, may_come_late=True)
        storm = Storm(client, seed, 5)
        storm.rage(steps)
        lost, texts = wire.lost, [storm.settle(text) for text in storm.texts]
        assert num_pending(client) == 0, "a request is waited for that nobody wants"
        for text in storm.texts:
            slot = engine.slots.get(text.slot.slot_id, text.slot.epoch)
            assert slot.tokens[: slot.length].tolist() == text.tokens
    assert engine.slots.num_used == 0
    assert engine.slots.pool.num_free == engine.slots.pool.num_pages
    engine.slots.check()
    return lost, texts


class Storm:
    """Calls on `count` slots of one client."""

    def __init__(self, client: Client, seed: int, count: int) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self._made = 0  # keys of opens and forks
        self.steps = 0
        self.texts = [self._open() for _ in range(count)]

    def rage(self, steps: int) -> None:
        """Calls until that many tokens were appended."""
        names, weights = list(CALLS), list(CALLS.values())
        while self.steps < steps:
            text = self._draw.choice(self.texts)
            before = len(text.tokens)
            name = self._draw.choices(names, weights)[0]
            if len(text.tokens) > MAX_TEXT:
                name = "reopen"
            getattr(self, f"_{name}")(text)
            self.steps += max(0, len(text.tokens) - before)

    def settle(self, text: Text) -> list[int]:
        """The text, when nothing runs any more that the client has left."""
        length = len(text.tokens)
        assert self._insist(lambda: text.slot.truncate(length)) == length
        return text.tokens

    def _insist(self, call: Callable[[], T]) -> T:
        """Make a call until its reply arrives."""
        while True:
            try:
                return call()
            except (DeadlineExceeded, ConnectionLost):
                continue

    def _key(self) -> str:
        self._made += 1
        return f"made {self._made}"

    def _sampling(self) -> Sampling | None:
        seed = self._draw.choice((0, self._draw.randrange(1, 99)))
        return Sampling(temperature=1.0, seed=seed) if seed else None

    def _open(self) -> Text:
        prompt = [self._draw.randrange(VOCAB) for _ in range(self._draw.randrange(1, 150))]
        key, sampling = self._key(), self._sampling()
        slot = self._insist(lambda: self._client.open(prompt, key=key, sampling=sampling))
        text = Text(slot, prompt, 0 if sampling is None else sampling.seed or 0)
        text.expect(slot.token)
        return text

    def _reopen(self, text: Text) -> None:
        self._insist(text.slot.close)
        text.slot.close()
        self.texts[self.texts.index(text)] = self._open()

    def _fork(self, text: Text) -> None:
        """Into the place of another slot."""
        place = self._draw.randrange(len(self.texts))
        if self.texts[place] is text:
            return
        self._insist(self.texts[place].slot.close)
        key, sampling = self._key(), self._sampling()
        slot = self._insist(lambda: text.slot.fork(key=key, sampling=sampling))
        seed = text.seed if sampling is None else sampling.seed or 0
        assert slot.token == text.token
        self.texts[place] = Text(slot, text.tokens.copy(), seed, text.token)

    def _next(self, text: Text) -> int | None:
        """What to name in a call: nothing, if the slot has something to append."""
        return None if text.token is not None else self._draw.randrange(VOCAB)

    def _step(self, text: Text) -> None:
        named, logits = self._next(text), self._draw.random() < 0.3
        step = self._insist(lambda: text.slot.step(named, logits=logits))
        text.grow(text.token if named is None else named, step)

    def _named_step(self, text: Text) -> None:
        token = self._draw.randrange(VOCAB)
        text.grow(token, self._insist(lambda: text.slot.step(token)))

    def _rows(self, text: Text) -> None:
        """A step of several slots in one request."""
        others = [one for one in self.texts if one is not text and len(one.tokens) < MAX_TEXT]
        rows = [text, *others[: self._draw.randrange(len(self.texts))]]
        named = [self._next(one) for one in rows]
        pairs = [(one.slot, token) for one, token in zip(rows, named, strict=True)]
        steps = self._insist(lambda: self._client.step(pairs))
        for one, token, step in zip(rows, named, steps, strict=True):
            one.grow(one.token if token is None else token, step)

    def _stream(self, text: Text) -> None:
        self._read(text, self._draw.randrange(1, 12), ahead=0)

    def _left_stream(self, text: Text) -> None:
        """Left while the daemon runs ahead."""
        self._read(text, self._draw.randrange(1, 5), ahead=self._draw.randrange(1, 40))

    def _drafts(self, text: Text) -> None:
        self._read(text, self._draw.randrange(1, 8), ahead=0, draft="ngram")

    def _read(self, text: Text, count: int, ahead: int, draft: str | None = None) -> None:
        """`count` tokens of streams; one whose frame was lost is followed by another, or resumed
        if it runs (the reader has not even begun)."""
        if text.token is None:
            self._named_step(text)
        end = len(text.tokens) + count
        may_resume = False

        def read() -> None:
            nonlocal may_resume
            stream = text.slot.stream(end - len(text.tokens) + ahead, draft=draft)
            if may_resume and draft is None:
                stream = text.slot.resume_stream()
            may_resume = not may_resume
            for step in stream:
                text.grow(text.token, step)
                if len(text.tokens) == end:
                    break

        while len(text.tokens) < end:
            try:
                self._insist(read)
            except RequestRejected as refusal:
                if refusal.code not in ("cancelled", "position_conflict"):
                    raise  # else it was a stream that was cancelled, or that never began

    def _verify(self, text: Text) -> None:
        """Some right tokens and then a wrong one."""
        if text.token is None:
            self._named_step(text)
        assert text.token is not None
        right, tokens = [], [*text.tokens, text.token]
        for _ in range(self._draw.randrange(4)):
            right.append(next_token(tokens, VOCAB, text.seed))
            tokens.append(right[-1])
        wrong = (next_token(tokens, VOCAB, text.seed) + 1) % VOCAB
        verified = self._insist(lambda: text.slot.verify([*right, wrong]))
        assert verified.accepted == len(right)
        for step in verified.steps:
            text.grow(text.token, step)

    def _truncate(self, text: Text) -> None:
        to = max(1, len(text.tokens) - self._draw.randrange(70))
        assert self._insist(lambda: text.slot.truncate(to)) == to
        del text.tokens[to:]
        text.token = None
