"""Bit for bit across `kill -9`: real daemons on the CPU backend, and clients that reopen."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from latentd.commands.child import Child
from latentd_client import ModelChanged, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("torch")

START_S = 120.0
PROMPT = [n % 251 for n in range(150)]
HOT = Sampling(temperature=1.0, seed=5)
OTHER = Sampling(temperature=0.8, top_p=0.9, seed=6)
FLAGS = ("--device", "cpu", "--max-slots", "6", "--max-ctx", "512", "--prefill-chunk", "64")


class Mortal:
    """A daemon that is killed and started again, at `folder`."""

    def __init__(self, folder: Path, config: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self.config = config
        self.child = self._start()
        self.endpoint = self.child.endpoint

    def _start(self) -> Child:
        model = ("--weights", "random", "--config", str(self.config), "--name", "tiny")
        child = Child(self._folder, (*model, *FLAGS))
        child.wait_ready(START_S, lambda status: None)
        return child

    def kill(self) -> None:
        """As `kill -9` does it."""
        self.child.process.kill()
        self.child.__exit__(None, None, None)

    def restart(self) -> None:
        self.kill()
        self.child = self._start()

    @contextlib.contextmanager
    def restarting(self, after_s: float) -> Iterator[None]:
        """Killed a while from now, and started again."""
        is_there = threading.Event()

        def restart() -> None:
            time.sleep(after_s)
            self.restart()
            is_there.set()
            self._is_over.wait()  # the daemon ends with the thread that has started it

        threading.Thread(target=restart).start()
        yield
        assert is_there.wait(START_S)

    def end(self) -> None:
        self.kill()
        self._is_over.set()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Mortal]:
    mortal = Mortal(tmp_path_factory.mktemp("m"), tiny_dir)
    yield mortal
    mortal.end()


def bits(slot: Any, count: int) -> list[bytes]:
    """The logits of so many steps."""
    return [slot.step(logits=True).logits.tobytes() for _ in range(count)]


def test_slots_forks_and_streams_go_on_with_the_same_bits_after_kill_9(
    mortal: Mortal, connect: Callable[..., Any]
) -> None:
    with connect(mortal.endpoint, reopen=True, timeout_s=START_S) as client:
        reference = client.open(PROMPT, sampling=HOT)
        forked = reference.fork(sampling=OTHER)
        expected, fork_expected = bits(reference, 40), bits(forked, 12)
        tokens = [step.token for step in client.open(PROMPT, sampling=HOT).stream(40)]

        slot = client.open(PROMPT, sampling=HOT)
        fork = slot.fork(sampling=OTHER)
        found, fork_found = bits(slot, 5), bits(fork, 5)
        streamed = []
        for step in client.open(PROMPT, sampling=HOT).stream(40, credit=4):
            streamed.append(step.token)
            if len(streamed) == 11:
                mortal.restart()  # amid the stream
        found += bits(slot, 5)
        fork_found += bits(fork, 7)
        with mortal.restarting(0.05):  # amid whatever step that is
            found += bits(slot, 30)
        assert fork_found == fork_expected
        assert found == expected
        assert streamed == tokens


def test_a_drafted_and_a_masked_stream_go_on_with_the_same_tokens_after_kill_9(
    mortal: Mortal, connect: Callable[..., Any]
) -> None:
    text, mask = [*PROMPT[:40], *PROMPT[:40]], np.arange(256) % 3 == 0
    with connect(mortal.endpoint, reopen=True, timeout_s=START_S) as client:
        drafted = [step.token for step in client.open(text).stream(30)]
        masked = [
            (step.token, step.logprob)
            for step in client.open(text, sampling=HOT).stream(30, mask=mask)
        ]
        one = client.open(text).stream(30, draft="ngram")
        two = client.open(text, sampling=HOT).stream(30, mask=mask, credit=2)
        first, second = [next(one) for _ in range(9)], [next(two) for _ in range(9)]
        mortal.restart()
        assert [step.token for step in (*first, *one)] == drafted
        assert [(step.token, step.logprob) for step in (*second, *two)] == masked


def test_other_weights_in_the_next_life_are_refused_by_name(
    mortal: Mortal, connect: Callable[..., Any], write_config: Callable[..., Path]
) -> None:
    with connect(mortal.endpoint, reopen=True, timeout_s=START_S) as client:
        slot = client.open(PROMPT)
        right, mortal.config = mortal.config, write_config(routed_scaling_factor=2.0)
        mortal.restart()
        with pytest.raises(ModelChanged, match=r"bits are others: 'tiny' .* in place of 'tiny'"):
            slot.step()
        mortal.config = right
        mortal.restart()
        assert slot.step().context_len == len(PROMPT) + 1
