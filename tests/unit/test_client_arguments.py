"""What callers give the clients by mistake: each is told what is wrong, and the client goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentd_client import AsyncClient, Client, Control, LatentdError, ProtocolError, Sampling
from serving import serving


@pytest.fixture
def client(endpoint: str) -> Iterator[Any]:
    """Untyped, as callers who err are."""
    with serving(endpoint), Client(endpoint, timeout_s=5.0) as client:
        yield client


@pytest.mark.parametrize("prompt", [None, 5, 1.5])
def test_a_prompt_that_is_no_list_is_named(client: Any, prompt: object) -> None:
    with pytest.raises(ProtocolError, match=f"prompt is {prompt}, must be a list of token ids"):
        client.open(prompt)
    client.ping()


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, "greedy", 5, [], Sampling])
def test_sampling_that_is_no_sampling_is_named(client: Any, sampling: object) -> None:
    slot = client.open([1])
    for call in (
        lambda: client.open([1], sampling=sampling),
        lambda: slot.step(sampling=sampling),
        lambda: list(slot.stream(3, sampling=sampling)),
    ):
        with pytest.raises(ProtocolError, match=r"must be a latentd_client\.Sampling"):
            call()
    assert slot.step().context_len == 2


def test_sampling_with_an_array_is_named(client: Any) -> None:
    with pytest.raises(ProtocolError, match=r"Sampling.*top_p=array"):
        client.open([1], sampling=Sampling(top_p=np.array([0.1, 0.2])))  # type: ignore[arg-type]


def test_rows_that_are_no_pairs_of_slots_and_tokens_are_named(client: Any) -> None:
    slot = client.open([1])
    for rows in (None, 5, slot, [slot], [(slot,)], [(slot, 1, 2)], "ab", [("s", 1)], [(None, 1)]):
        with pytest.raises(ProtocolError, match="must be pairs of a slot and a token"):
            client.step(rows)
    assert client.step([(slot, None)])[0].context_len == 2


@pytest.mark.parametrize("masks", [5, iter(())])
def test_masks_that_are_no_list_are_named(client: Any, masks: object) -> None:
    with pytest.raises(ProtocolError, match=r"masks are .*, must be a list of one for each row"):
        client.step([(client.open([1]), None)], masks=masks)


@pytest.mark.parametrize("stop", [None, 5])
def test_stop_that_is_no_list_is_named(client: Any, stop: object) -> None:
    with pytest.raises(ProtocolError, match=f"stop is {stop}, must be a list of token ids"):
        list(client.open([1]).stream(3, stop=stop))


@pytest.mark.parametrize("name", ["max_steps", "credit"])
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_number_of_a_stream_that_is_none_is_named(
    client: Any, name: str, is_forgotten: bool
) -> None:
    slot = client.open([1])
    slot._is_forgotten = is_forgotten  # as after a stream that was left
    for value in ("3", 1.5, True):
        with pytest.raises(ProtocolError, match=f"{name} is {value!r}, must be an int"):
            list(slot.stream(**{"max_steps": 2, name: value}))
    for value in (0, -1):
        with pytest.raises(LatentdError, match=f"{name} is {value}, must be 1 or more"):
            list(slot.stream(**{"max_steps": 2, name: value}))


@pytest.mark.parametrize("endpoint", [5, b"ipc:///x", Path("/x")])
@pytest.mark.parametrize("kind", [Client, AsyncClient, Control])
def test_an_endpoint_that_is_no_text_is_named(kind: Any, endpoint: object) -> None:
    with pytest.raises(ProtocolError, match=r"endpoint is .*, must be text such as ipc:///run"):
        kind(endpoint)


@pytest.mark.parametrize("drain_s", ["soon", [1], -1.0])
def test_a_time_to_drain_that_is_none_is_named(client: Any, drain_s: object) -> None:
    with Control(client.info.control) as control:
        with pytest.raises(ProtocolError, match=r"drain_s is .*, must be a number of seconds"):
            control.drain(drain_s)  # type: ignore[arg-type]
        assert control.health()["state"] == "ready"
