"""A slot of the asyncio client."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from latentd_client import _drafting, _forking, _streaming, _transfer
from latentd_client._asked import asked
from latentd_client._slot import BaseSlot
from latentd_client.errors import LatentdError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._drafting import Draft, DraftReader
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client._stream import StreamReader
    from latentd_client.aio import AsyncClient
    from latentd_client.pages import Pages, Piece
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling, Step, Verified


class AsyncSlot(BaseSlot):
    """A sequence's seat in the daemon, made by `AsyncClient.open`; one task at a time uses it."""

    def __init__(
        self, client: AsyncClient, header: Header, raw: Sequence[Tensor], prompt: Prompt = ()
    ) -> None:
        super().__init__(header, raw, prompt)
        self._client = client

    async def step(
        self, token: int | None = None, *, logits: bool = False, logprobs: int = 0,
        sampling: Sampling | None = None, bias: Bias | None = None, mask: Mask | None = None,
        timeout_s: float | None = None,
    ) -> Step:  # fmt: skip
        """See `Slot.step`. A cancelled step may have run: repeat the same call safely."""
        calls = self._client._calls
        extras = asked(sampling, logits, logprobs, bias, mask)
        return await self._client._run(calls.step(self, token, extras, timeout_s))

    def stream(
        self, max_steps: int, stop: Iterable[int] = (), *,
        stop_sequences: Iterable[Iterable[int]] = (), credit: int | None = None,
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, draft: Draft | None = None, timeout_s: float | None = None,
    ) -> AsyncIterator[Step]:  # fmt: skip
        """See `Slot.stream`. After a `break` the stream ends with the next call on the slot, or
        when the generator is closed (`contextlib.aclosing`)."""
        calls, extras = self._client._calls, asked(sampling, False, logprobs, bias, mask)
        if draft is not None:
            drafts = _drafting.start(
                calls, self, max_steps, stop, stop_sequences, draft, extras, timeout_s
            )
            return self._iterate_drafts(drafts)
        start = _streaming.stream(
            calls, self, max_steps, stop, stop_sequences, credit, extras, timeout_s
        )
        return self._iterate(start)

    def resume_stream(
        self, *, credit: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[Step]:
        """See `Slot.resume_stream`."""
        return self._iterate(_streaming.resume(self._client._calls, self, credit, timeout_s))

    async def _iterate(self, start: Script[StreamReader]) -> AsyncIterator[Step]:
        """The steps of a stream, from the first one asked for on."""
        client = self._client
        calls = client._calls
        reader = await client._run(start)
        try:
            while True:
                step = await client._run(_streaming.stream_next(calls, self, reader))
                if step is None:
                    return
                yield step
        finally:
            if reader.end is None and not client.is_closed:
                with contextlib.suppress(LatentdError):
                    await client._run(_streaming.hang_up(calls, self))

    async def _iterate_drafts(self, start: Script[DraftReader]) -> AsyncIterator[Step]:
        """The same of drafts that are verified."""
        client = self._client
        reader = await client._run(start)
        while step := await client._run(_drafting.draft_next(client._calls, self, reader)):
            yield step

    async def verify(
        self, draft: Iterable[int], *, token: int | None = None, stop: Iterable[int] = (),
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, timeout_s: float | None = None,
    ) -> Verified:  # fmt: skip
        """See `Slot.verify`."""
        extras = asked(sampling, False, logprobs, bias, mask)
        script = _drafting.verify(self._client._calls, self, draft, token, stop, extras, timeout_s)
        return await self._client._run(script)

    async def truncate(self, to: int, *, timeout_s: float | None = None) -> int:
        """See `Slot.truncate`."""
        return await self._client._run(self._client._calls.truncate(self, to, timeout_s))

    async def fork(
        self, *, sampling: Sampling | None = None, key: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Slot.fork`."""
        client = self._client
        script = _forking.fork(
            client._calls, lambda header, raw: AsyncSlot(client, header, raw), self, sampling, key,
            timeout_s,
        )  # fmt: skip
        return await client._run(script)

    async def export(
        self, *, piece_bytes: int = _transfer.PIECE_BYTES, timeout_s: float | None = None
    ) -> Pages:
        """See `Slot.export`; `pieces` are for `async for`."""
        client = self._client
        head = await client._run(
            _transfer.begin_export(client._calls, self, piece_bytes, timeout_s)
        )
        return head.pages(self._iterate_pages(head, timeout_s))

    async def _iterate_pages(
        self, head: _transfer.Head, timeout_s: float | None
    ) -> AsyncIterator[Piece]:
        client = self._client
        for first, count in head.ranges():
            script = _transfer.export_piece(
                client._calls, self, len(head.tokens), first, count, timeout_s
            )
            yield await client._run(script)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Give the slot and its pages back; a second time does nothing."""
        await self._client._run(self._client._calls.close(self, timeout_s))

    async def __aenter__(self) -> AsyncSlot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._client.is_closed:
            await self.close()
