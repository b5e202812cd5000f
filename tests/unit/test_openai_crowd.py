"""Many of OpenAI's clients at latentd-openai at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from doors import door_before, openai_client  # noqa: E402
from fakes import FakeEngine  # noqa: E402
from gates import slow_down, wait_until  # noqa: E402
from lives import Lives  # noqa: E402
from serving import serving  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from openai import AsyncOpenAI, OpenAI

STREAMS = 32
STEPS = 60
FILES = 800


def client_of(url: str) -> AsyncOpenAI:
    client: AsyncOpenAI = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return client


async def text_of(client: AsyncOpenAI, seed: int, hang_up_after: int | None = None) -> str:
    """A streamed text, or its beginning."""
    text, chunks = "", 0
    stream = await client.completions.create(
        model="fake", prompt=f"Chapter {seed}", max_tokens=STEPS, seed=seed, stream=True,
        logit_bias={"0": -100},
    )  # fmt: skip
    async for chunk in stream:
        text += chunk.choices[0].text
        chunks += 1
        if chunks == hang_up_after:
            await stream.close()
            break
    return text


async def texts_of(url: str, *hang_ups: int | None) -> list[str]:
    """Those of many streams side by side."""
    async with client_of(url) as client:
        asked = (text_of(client, seed, after) for seed, after in enumerate(hang_ups))
        return await asyncio.gather(*asked)


async def each_alone(url: str) -> list[str]:
    async with client_of(url) as client:
        return [await text_of(client, seed) for seed in range(STREAMS)]


def test_a_text_is_the_same_alone_and_beside_many_of_which_some_hang_up(endpoint: str) -> None:
    hang_ups = [None if seed % 2 else 1 + seed % 7 for seed in range(STREAMS)]
    engine = FakeEngine(max_slots=STREAMS, buckets=(1, 8, STREAMS))
    with serving(endpoint, engine), door_before(endpoint) as url:
        alone = asyncio.run(each_alone(url))
        beside = asyncio.run(texts_of(url, *hang_ups))
        wait_until(lambda: engine.slots.num_used == 0)
    assert beside[1::2] == alone[1::2]
    for whole, begin in zip(alone[::2], beside[::2], strict=True):
        assert whole.startswith(begin)


def test_whoever_hangs_up_gives_his_slots_back_at_once(endpoint: str) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 480, "temperature": 0,
                             "logit_bias": {"0": -100}}  # fmt: skip
    engine = FakeEngine()
    slow_down(engine, 0.01)
    with serving(endpoint, engine), door_before(endpoint) as url, openai_client(url) as client:
        stream = client.completions.create(**asked, stream=True)
        next(iter(stream))
        assert engine.slots.num_used == 1
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(**asked, n=2)
        wait_until(lambda: engine.slots.num_used == 0)
    assert engine.fake.launches < 480


def test_streams_go_on_with_the_same_texts_when_the_daemon_dies(endpoint: str) -> None:
    engines = [FakeEngine(max_slots=STREAMS, buckets=(1, 8, STREAMS)) for _ in range(2)]
    with Lives(endpoint) as lives, door_before(endpoint) as url:
        lives.restart(engines[0])

        async def with_a_death() -> list[str]:
            running = asyncio.create_task(texts_of(url, *[None] * STREAMS))
            while engines[0].fake.launches < STREAMS + 20:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(lives.restart, engines[1])
            return await running

        beside = asyncio.run(with_a_death())
        assert engines[1].fake.launches > 0
        assert beside == asyncio.run(each_alone(url))


def test_more_connections_than_there_are_files_for_are_ended_in_silence(
    endpoint: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        serving(endpoint),
        log.open("w") as stderr,
        door_before(endpoint, stderr=stderr, preexec_fn=allow_few_files) as url,
        openai_client(url) as client,
    ):
        client.models.list()
        at = urlsplit(url)
        with contextlib.ExitStack() as others:
            for _ in range(FILES + 100):
                with contextlib.suppress(ConnectionResetError):
                    others.enter_context(socket.create_connection((at.hostname, at.port)))
            assert [model.id for model in client.models.list()] == ["fake"]
        with openai_client(url) as later:
            wait_until(lambda: is_served(later))
    assert log.read_text() == ""


def is_served(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False


def allow_few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
