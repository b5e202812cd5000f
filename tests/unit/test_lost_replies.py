"""Calls whose replies are lost and that are made again: nothing is appended twice or forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import storm
from fakes import FakeEngine
from latentd_client import AsyncClient, Client, DeadlineExceeded, protocol
from lossy import LossyWire, lossy, num_pending
from serving import Blocking, serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client import Step

T = TypeVar("T")


def insist(call: Callable[[], T]) -> T:
    """Make a call until its reply arrives."""
    for _ in range(100):
        try:
            return call()
        except DeadlineExceeded:
            pass
    raise AssertionError("100 replies in a row were lost")


@pytest.mark.parametrize("call", ["step", "stream", "verify"])
def test_a_stream_left_early_is_settled_though_its_end_and_its_truncate_are_not_heard_of(
    endpoint: str, call: str
) -> None:
    engine = FakeEngine()
    truncates: list[dict[str, object]] = []

    def is_lost(message: list[bytes]) -> bool:
        header = protocol.decode_header(message[0])
        if "end" in header:
            return not truncates
        if set(header) == {"v", "id", "status", "context_len"}:
            truncates.append(header)
        return len(truncates) == 1 and truncates[0] is header

    with serving(endpoint, engine), Client(endpoint) as client:
        slot = client.open([1, 2])
        LossyWire(client, is_lost)
        tokens = [1, 2, slot.token or 0]
        for step in slot.stream(2000):
            tokens.append(step.token)
            if len(tokens) == 5:
                break
        calls: dict[str, Callable[[], Step]] = {
            "step": lambda: slot.step(logits=True),
            "stream": lambda: next(slot.stream(1)),
            "verify": lambda: slot.verify([]).steps[0],
        }
        step = insist(calls[call])
    assert len(truncates) == 1
    assert (step.token, step.context_len) == (engine.expected_token(tokens), len(tokens))


def test_10000_steps_of_which_every_second_reply_is_lost_end_with_the_texts_of_a_calm_run(
    endpoint: str,
) -> None:
    lost, texts = storm.run(endpoint, 1, 10_000, 0.5)
    assert lost > 10_000
    assert (0, texts) == storm.run(endpoint, 1, 10_000, 0.0)


def test_an_asynchronous_client_that_loses_every_second_reply_ends_with_the_texts_of_a_calm_run(
    endpoint: str,
) -> None:
    with asyncio.Runner() as runner:

        async def start() -> AsyncClient:
            return await AsyncClient(endpoint).connect()

        def connect(endpoint: str) -> Any:
            return Blocking(runner.run(start()), runner)

        lost, texts = storm.run(endpoint, 2, 3_000, 0.5, connect)
    assert lost > 3_000
    assert (0, texts) == storm.run(endpoint, 2, 3_000, 0.0)


def test_streams_whose_last_frames_are_lost_leave_nothing_to_be_waited_for(
    endpoint: str, connect: Callable[..., Any]
) -> None:
    with serving(endpoint), connect(endpoint) as client:
        slot = client.open([1, 2])
        lossy(client, lambda message: "end" in protocol.decode_header(message[0]))
        for _ in range(10):
            with contextlib.suppress(DeadlineExceeded):
                for _ in slot.stream(2):
                    pass
            slot.truncate(2)
            slot.step(1)
        slot.stream(2)
        slot.close()
        assert num_pending(client) == 0
