"""Runs a job at the daemon: a slot for each text, all of them side by side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Final

from latentd_openai.writing import Delta, Writing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

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
        choices = [self._choice(i, opened[i // self.job.n]) for i in range(self.job.choices)]
        return choices[0] if len(choices) == 1 else side_by_side(choices)

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
    """What comes of several streams, as it comes. The first error of one ends them all."""
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(QUEUED)

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
