"""Forks through both clients."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from fakes import FakeEngine
from gates import Gate, wait_until
from latentd_client import DeadlineExceeded, RequestRejected, Sampling
from serving import halted

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving import Running

    Connect = Callable[..., Any]


def test_a_fork_goes_on_where_its_source_was(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        assert "fork" in client.info.features
        slot = client.open([1, 2, 3])
        fork = slot.fork()
        assert (fork.context_len, fork.token, fork.seed) == (3, slot.token, slot.seed)
        steps = [slot.step() for _ in range(70)]
        assert [fork.step() for _ in range(70)] == steps
        slot.close()
        assert fork.step(9).context_len == 74


def test_forks_of_one_prompt_are_different_samples(connect: Connect, running: Running) -> None:
    hot = Sampling(temperature=1.0)
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3], sampling=hot)
        forks = [slot.fork(sampling=hot) for _ in range(3)]
        assert len({slot.seed, *(fork.seed for fork in forks)}) == 4
        texts = [tuple(step.token for step in fork.stream(20)) for fork in forks]
        assert len(set(texts)) == 3
        assert slot.fork(sampling=Sampling(temperature=1.0, seed=5)).seed == 5


def test_a_fork_of_a_stream_left_early_starts_at_the_last_step_read(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        read = list(islice(slot.stream(500), 5))
        fork = slot.fork()
        assert (fork.context_len, fork.token) == (read[-1].context_len, read[-1].token)
        assert list(fork.stream(9)) == list(slot.stream(9))


def test_a_fork_is_found_again_by_its_key(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        fork = slot.fork(key="mine")
        again = slot.fork(key="mine")
        assert (again.slot_id, again.epoch) == (fork.slot_id, fork.epoch)
        slot.step()
        with pytest.raises(RequestRejected, match="another open, fork or adoption"):
            slot.fork(key="mine")


def test_a_fork_that_timed_out_gives_its_slot_back(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        slot = client.open([1, 2, 3])
        assert isinstance(running.engine, FakeEngine)
        gate = Gate(running.engine)
        with halted(running.endpoint, gate), pytest.raises(DeadlineExceeded):
            slot.fork(timeout_s=0.05)
        wait_until(lambda: running.engine.stats()["forks"] == 1)
        wait_until(lambda: (client.ping(), running.engine.slots.num_used)[1] == 1)
