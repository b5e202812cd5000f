"""Texts of latentd-openai as they come, without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from latentd_client import Sampling
from latentd_client.text import ByteCodec
from latentd_openai.decoding import sampling_of, side_by_side
from latentd_openai.job import Job
from latentd_openai.writing import Delta, Writing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def job(stop: tuple[str, ...] = (), logprobs: int | None = 0, seed: int | None = None) -> Job:
    return Job(
        prompts=[[65]], n=1, max_tokens=99, sampling=Sampling(seed=seed), stop=list(stop),
        ends=(0,), logprobs=logprobs, echo=False, bias=None, stream=False, stream_usage=False,
    )  # fmt: skip


def written(text: bytes, wanted: Job) -> list[Delta]:
    """The deltas of a text whose every byte is a token."""
    writing = Writing(0, ByteCodec(), [65], wanted)
    deltas = [writing.push(token, -1.0, ()) for token in text]
    return [*filter(None, deltas), writing.finish()]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_pieces_are_whole_characters_beside_the_tokens_that_make_them(logprobs: int | None) -> None:
    deltas = written("a€b".encode(), job(logprobs=logprobs))
    assert [delta.text for delta in deltas] == ["a", "€", "b", ""]
    if logprobs is not None:
        assert [len(delta.told) for delta in deltas] == [1, 3, 1, 0]
        assert [one.offset for one in deltas[1].told] == [1, 1, 1]


def test_what_may_be_the_beginning_of_a_stop_string_waits_with_its_tokens() -> None:
    *deltas, last = written(b"one, two", job(stop=(", th",)))
    assert "".join(delta.text for delta in deltas) == "one, two"
    assert last == Delta(0, "", [], "length")
    for delta in deltas:
        assert bytes(one.token for one in delta.told).decode() == delta.text


def test_the_tokens_of_a_stop_are_not_told() -> None:
    for text, stop in ((b"one, two", (", two",)), (b"one\0", ())):
        deltas = written(text, job(stop=stop))
        assert bytes(one.token for delta in deltas for one in delta.told) == b"one"
        assert deltas[-1].finish == "stop"


def test_the_beginning_of_a_character_is_told_at_the_end() -> None:
    last = written("a€".encode()[:-1], job())[-1]
    assert (last.text, len(last.told)) == ("\N{REPLACEMENT CHARACTER}", 2)


def test_each_continuation_has_a_seed_of_its_own() -> None:
    assert sampling_of(job(seed=None), 1).seed is None
    assert sampling_of(job(seed=(1 << 64) - 1), 1).seed == 0


def test_one_error_ends_all_texts_and_so_does_whoever_leaves() -> None:
    ended = []

    async def endless(number: int, is_bad: bool) -> AsyncGenerator[Delta, None]:
        try:
            yield Delta(number, "a", [])
            if is_bad:
                raise ValueError("bad")
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async def read(is_bad: bool, most: int) -> None:
        streams = [endless(number, is_bad and number == 2) for number in range(3)]
        async with contextlib.aclosing(side_by_side(streams)) as deltas:
            for _ in range(most):
                await anext(deltas)

    asyncio.run(read(False, 3))
    assert sorted(ended) == [0, 1, 2]
    ended.clear()
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(read(True, 4))
    assert sorted(ended) == [0, 1, 2]


def test_what_is_there_at_the_same_time_is_one_delta_of_each_choice() -> None:
    async def texts(number: int) -> AsyncGenerator[Delta, None]:
        for text in "abc":
            yield Delta(number, text, [])
        await asyncio.sleep(0.05)
        yield Delta(number, "d", [], "stop")

    async def read() -> list[Delta]:
        return [delta async for delta in side_by_side([texts(0), texts(1)])]

    first, last = [Delta(i, "abc", []) for i in (0, 1)], [Delta(i, "d", [], "stop") for i in (0, 1)]
    found = asyncio.run(read())
    assert (found[:2], sorted(found[2:])) == (first, last)
