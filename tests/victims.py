"""A client that behaves, in a process of its own beside others that do not."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from latentd_client import Client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS = 64
"""Of the text that is decoded again and again."""


class Victim:
    """The process: `work` has it decode for some time."""

    def __init__(self, endpoint: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(endpoint, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()  # it has its text

    def start(self, seconds: float) -> None:
        """Begin to decode."""
        self._ours.send(seconds)

    def times(self) -> list[float]:
        """The microseconds of each step since `start`. Raises what has gone wrong: a refusal, a
        lost connection, or a text with other bits than the first time."""
        result = self._ours.recv()
        if isinstance(result, str):
            raise AssertionError(f"beside the attackers: {result}")
        times: list[float] = result
        return times

    def close(self) -> None:
        """End it."""
        self._ours.close()
        self._process.join(10)
        self._process.terminate()
        self._process.join()


def _run(endpoint: str, pipe: Connection[Any, Any]) -> None:
    with Client(endpoint, timeout_s=120) as client:
        slot = client.open([1, 2, 3, 4, 5])
        text, _ = _decode(slot)
        pipe.send(None)
        while True:
            try:
                seconds = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(_work(slot, text, seconds))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def _work(slot: Any, text: list[tuple[int, float]], seconds: float) -> list[float]:
    end, times = time.monotonic() + seconds, []
    while time.monotonic() < end:
        again, took = _decode(slot)
        assert again == text, f"other bits: {again} for {text}"
        times += took
    return times


def _decode(slot: Any) -> tuple[list[tuple[int, float]], list[float]]:
    """The text from the prompt on, with its log-probabilities, and the time of each step."""
    slot.truncate(5)
    text, times, token = [], [], 6
    for _ in range(TOKENS):
        begin = time.perf_counter()
        step = slot.step(token)
        times.append((time.perf_counter() - begin) * 1e6)
        text.append((step.token, step.logprob))
        token = step.token
    return text, times
