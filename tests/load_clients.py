"""Clients that keep a daemon busy, each in a process of its own, and their clocks.

A round of a client: open a prompt, single steps, a stream, a fork that goes on beside its parent,
close both. The prompts are few and the sampling is greedy, so every text is known after its first
time: each later one must have the same tokens and log-probabilities.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from latentd_client import Client
from timed_streams import prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Barrier

    from latentd_client import Slot, Step

OPERATIONS: Final = ("open", "step", "stream", "fork", "close")
"""What is timed: requests, and of a stream the time from token to token (the first from its
request)."""
PROMPTS: Final = 16
STEPS, STREAMED, FORKED = 32, 64, 16
"""Tokens of a round: by single steps, in a stream, and of a fork and of its parent."""
START_S: Final = 120.0

Text = list[tuple[int, float]]


@dataclass
class Work:
    """What a client has done: microseconds by operation, tokens, rounds, and its texts by prompt;
    `elapsed_s` from the common start to the end of its last round."""

    times: dict[str, Any] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    tokens: int = 0
    rounds: int = 0
    elapsed_s: float = 0.0
    texts: dict[int, Text] = field(default_factory=dict)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Time an operation."""
        begin = time.perf_counter()
        yield
        self.times[name].append((time.perf_counter() - begin) * 1e6)


_barrier: Barrier | None = None


def keep_barrier(barrier: Barrier) -> None:
    """Set up a worker process."""
    global _barrier
    _barrier = barrier


def work(endpoint: str, number: int, seconds: float) -> Work:
    """One client's work, begun when all are there. Raises LatentdError for what is refused, and
    AssertionError for a text with other bits."""
    assert _barrier is not None
    done = Work()
    with Client(endpoint, timeout_s=START_S) as client:
        _round(client, number, Work())
        _barrier.wait(START_S)
        begin = time.monotonic()
        while (elapsed_s := time.monotonic() - begin) < seconds:
            _round(client, number + done.rounds, done)
            done.rounds += 1
        done.elapsed_s = elapsed_s
    done.times = {name: np.array(times, np.float32) for name, times in done.times.items()}
    return done


def _round(client: Client, number: int, done: Work) -> None:
    which = number % PROMPTS
    with done.clock("open"):
        slot = client.open(prompt(which))
    text = [_step(slot, done) for _ in range(STEPS)] + _stream(slot, STREAMED, done)
    with done.clock("fork"):
        fork = slot.fork()
    forked = _stream(fork, FORKED, done)
    text += [_step(slot, done) for _ in range(FORKED)]
    for each in (fork, slot):
        with done.clock("close"):
            each.close()
    done.tokens += len(text) + len(forked)
    assert forked == text[-FORKED:], f"the fork of prompt {which} has other bits than its parent"
    assert done.texts.setdefault(which, text) == text, f"prompt {which} has other bits than before"


def _step(slot: Slot, done: Work) -> tuple[int, float]:
    with done.clock("step"):
        step = slot.step()
    return _bits(step)


def _stream(slot: Slot, count: int, done: Work) -> Text:
    text, last = [], time.perf_counter()
    for step in slot.stream(count):
        now = time.perf_counter()
        done.times["stream"].append((now - last) * 1e6)
        last = now
        text.append(_bits(step))
    return text


def _bits(step: Step) -> tuple[int, float]:
    return step.token, step.logprob
