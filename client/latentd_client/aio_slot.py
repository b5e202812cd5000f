"""A slot of the asyncio client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from latentd_client import _drafting, _stepping, _streaming, _transfer
from latentd_client._asked import asked
from latentd_client._forking import Forking
from latentd_client._given import token_ids
from latentd_client._slot import BaseSlot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
    from types import TracebackType

    from latentd_client._aio_session import AsyncSession
    from latentd_client._drafting import Draft, DraftReader
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client._known import Known
    from latentd_client._stream import StreamReader
    from latentd_client.pages import Pages, Piece
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling, Step, Verified


class AsyncSlot(BaseSlot):
    """A sequence's seat in the daemon, made by `AsyncClient.open`; one task at a time uses it."""

    def __init__(
        self, session: AsyncSession, header: Header, raw: Sequence[Tensor], prompt: Prompt = (),
        known: Known | None = None,
    ) -> None:  # fmt: skip
        super().__init__(session.calls.session, header, raw, prompt, known)
        self._session = session

    async def step(
        self, token: int | None = None, *, logits: bool = False, logprobs: int = 0,
        sampling: Sampling | None = None, bias: Bias | None = None, mask: Mask | None = None,
        timeout_s: float | None = None,
    ) -> Step:  # fmt: skip
        """See `Slot.step`. A step whose task is cancelled is taken back at the daemon if it was not
        launched; repeat the same call safely."""
        session, extras = self._session, asked(sampling, logits, logprobs, bias, mask)
        return await session.run(
            lambda: _stepping.step(session.calls, self, token, extras, timeout_s), timeout_s
        )

    def stream(
        self, max_steps: int, stop: Iterable[int] = (), *,
        stop_sequences: Iterable[Iterable[int]] = (), credit: int | None = None,
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, draft: Draft | None = None, timeout_s: float | None = None,
    ) -> AsyncGenerator[Step, None]:  # fmt: skip
        """See `Slot.stream`. After a `break` the stream ends with the next call on the slot, or
        when the generator is closed (`contextlib.aclosing`)."""
        extras = asked(sampling, False, logprobs, bias, mask)
        if draft is not None:
            drafts = _drafting.start(
                self, max_steps, stop, stop_sequences, draft, extras, timeout_s
            )
            return self._iterate_drafts(drafts)
        return self._iterate(
            _streaming.stream(
                self._session.calls, max_steps, stop, stop_sequences, credit, extras, timeout_s
            )
        )

    def resume_stream(
        self, *, credit: int | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Step, None]:
        """See `Slot.resume_stream`."""
        return self._iterate(_streaming.resume(self._session.calls, self, credit, timeout_s))

    async def _iterate(self, reader: StreamReader) -> AsyncGenerator[Step, None]:
        """The steps of a stream, which begins with the first one asked for."""
        session, calls = self._session, self._session.calls
        try:
            while step := await session.run(
                lambda: _streaming.stream_next(calls, self, reader), reader.timeout_s, reader
            ):
                yield step
        finally:
            if reader.end is None:
                await session.run_now(_streaming.hang_up(calls, self, reader))

    async def _iterate_drafts(self, reader: DraftReader) -> AsyncGenerator[Step, None]:
        """The same of drafts that are verified."""
        session, calls = self._session, self._session.calls
        while step := await session.run(
            lambda: _drafting.draft_next(calls, self, reader), reader.timeout_s
        ):
            yield step

    async def verify(
        self, draft: Iterable[int], *, token: int | None = None, stop: Iterable[int] = (),
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, timeout_s: float | None = None,
    ) -> Verified:  # fmt: skip
        """See `Slot.verify`."""
        session, extras = self._session, asked(sampling, False, logprobs, bias, mask)
        ids, ends = token_ids(draft, "draft"), token_ids(stop, "stop")
        return await session.run(
            lambda: _drafting.verify(session.calls, self, ids, token, ends, extras, timeout_s),
            timeout_s,
        )

    async def truncate(self, to: int, *, timeout_s: float | None = None) -> int:
        """See `Slot.truncate`."""
        session = self._session
        return await session.run(lambda: session.calls.truncate(self, to, timeout_s), timeout_s)

    async def fork(
        self, *, sampling: Sampling | None = None, key: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Slot.fork`."""
        session = self._session
        forking = Forking(self, sampling, key, timeout_s)
        return await session.run(
            lambda: forking.run(session.calls, partial(AsyncSlot, session)), timeout_s
        )

    async def export(
        self, *, piece_bytes: int = _transfer.PIECE_BYTES, timeout_s: float | None = None
    ) -> Pages:
        """See `Slot.export`; `pieces` are for `async for`."""
        session = self._session
        head = await session.run(
            lambda: _transfer.begin_export(session.calls, self, piece_bytes, timeout_s), timeout_s
        )
        return head.pages(self._iterate_pages(head, timeout_s))

    async def _iterate_pages(
        self, head: _transfer.Head, timeout_s: float | None
    ) -> AsyncIterator[Piece]:
        session, length = self._session, len(head.tokens)
        for first, count in head.ranges():
            yield await session.run(
                partial(
                    _transfer.export_piece, session.calls, self, length, first, count, timeout_s
                ),
                timeout_s,
            )

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Give the slot and its pages back; a second time does nothing."""
        session = self._session
        await session.run(lambda: session.calls.close(self, timeout_s), timeout_s)

    async def __aenter__(self) -> AsyncSlot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._session.is_closed:
            await self.close()
