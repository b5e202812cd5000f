"""Runs a job at the daemon: a slot for each text, all of them side by side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Final

from latentd_openai.writing import Delta, Writing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from latentd_client import AsyncClient, AsyncSlot, Sampling
    from latentd_client.text import Codec
    from latentd_openai.job import Job

QUEUED: Final = 64
"""Most deltas that wait for a reader who is slower than the daemon."""


class Decoding:
    """A job on its way. `prompt_tokens`, `cached_tokens` and `completion_tokens` count all texts;
    they are known when the last delta has come."""

    def __init__(self, client: AsyncClient, codec: Codec, job: Job) -> None:
        self.job = job
        self.prompt_tokens = sum(map(len, job.prompts))
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._client, self._codec = client, codec

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """What comes of all choices; choice i is of prompt i // n. Closing it gives the slots back
        and cancels what runs. Raises LatentdError."""
        opened = [asyncio.Event() for _ in self.job.prompts]
        return side_by_side(
            [self._choice(i, opened[i // self.job.n]) for i in range(self.job.choices)]
        )

    async def _choice(self, index: int, opened: asyncio.Event) -> AsyncGenerator[Delta, None]:
        """One text. All but the first of a prompt wait until that has computed it: they find its
        pages in the daemon's cache."""
        job, is_first = self.job, index % self.job.n == 0
        prompt = job.prompts[index // job.n]
        if not is_first:
            await opened.wait()
        wants_scores = job.echo and job.logprobs is not None
        async with await self._client.open(
            prompt, sampling=sampling_of(job, index % job.n), logprobs=job.logprobs or 0,
            prompt_logprobs=job.logprobs if wants_scores else None, bias=job.bias,
        ) as slot:  # fmt: skip
            opened.set()
            self.cached_tokens += slot.cached_tokens if is_first else 0
            writing = Writing(index, self._codec, prompt, job)
            if job.echo:
                yield writing.echo(slot.prompt_logprobs)
            async with contextlib.aclosing(self._continue(slot, writing)) as deltas:
                async for delta in deltas:
                    yield delta
            self.completion_tokens += writing.tokens
            yield writing.finish()

    async def _continue(self, slot: AsyncSlot, writing: Writing) -> AsyncGenerator[Delta, None]:
        """What is decoded behind the prompt."""
        job = self.job
        if job.max_tokens == 0 or slot.token is None or slot.logprob is None:
            return
        if delta := writing.push(slot.token, slot.logprob, slot.top):
            yield delta
        room = min(job.max_tokens - 1, self._client.info.max_ctx - slot.context_len)
        if writing.is_over or room <= 0:
            return
        stream = slot.stream(room, job.ends, logprobs=job.logprobs or 0, bias=job.bias)
        async with contextlib.aclosing(stream) as steps:
            async for step in steps:
                if delta := writing.push(step.token, step.logprob, step.top):
                    yield delta
                if writing.is_over:
                    return


def sampling_of(job: Job, number: int) -> Sampling:
    """That of the continuation `number` of a prompt: each has a seed of its own."""
    if job.sampling.seed is None:
        return job.sampling
    return dataclasses.replace(job.sampling, seed=(job.sampling.seed + number) % (1 << 64))


async def side_by_side(
    streams: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[Delta, None]:
    """What comes of several streams, as it comes: what is there of a choice at the same time is one
    delta. The first error of a stream ends them all, behind what came before it."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(QUEUED)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for delta in _by_choice(items):
                yield delta
            for error in items:
                if isinstance(error, Exception):
                    raise error
            running -= items.count(None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: AsyncGenerator[Delta, None], queue: asyncio.Queue[Delta | Exception | None]
) -> None:
    """Move a stream's deltas into the queue, and then None or its error."""
    try:
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                await queue.put(delta)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


def _by_choice(items: Sequence[Delta | Exception | None]) -> Iterable[Delta]:
    joined: dict[int, Delta] = {}
    for item in items:
        if isinstance(item, Delta):
            before = joined.get(item.choice)
            joined[item.choice] = item if before is None else before.joined(item)
    return joined.values()
