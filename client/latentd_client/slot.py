"""A slot of the blocking client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from latentd_client import _drafting, _stepping, _streaming, _transfer
from latentd_client._asked import asked
from latentd_client._forking import Forking
from latentd_client._given import token_ids
from latentd_client._slot import BaseSlot

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    from latentd_client._drafting import Draft, DraftReader
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client._known import Known
    from latentd_client._session import Session
    from latentd_client._stream import StreamReader
    from latentd_client.pages import Pages, Piece
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling, Step, Verified


class Slot(BaseSlot):
    """A sequence's seat in the daemon, made by `Client.open`. As a context manager it closes."""

    def __init__(
        self, session: Session, header: Header, raw: Sequence[Tensor], prompt: Prompt = (),
        known: Known | None = None,
    ) -> None:  # fmt: skip
        super().__init__(session.calls.session, header, raw, prompt, known)
        self._session = session

    def step(
        self, token: int | None = None, *, logits: bool = False, logprobs: int = 0,
        sampling: Sampling | None = None, bias: Bias | None = None, mask: Mask | None = None,
        timeout_s: float | None = None,
    ) -> Step:  # fmt: skip
        """Append one token (the last sampled one without `token`) and sample the next.

        `logits` asks for float32 [vocab_size], `logprobs` for that many likeliest tokens (up to
        20); `sampling` holds from this step on, with the slot's seed unless it names one. `bias`
        (by token id, at most 1024) is added to the logits of this step, and `mask` allows tokens:
        bool [vocab_size], or its bits (`np.packbits(..., bitorder="little")`, or uint32). Raises
        RequestRejected (context_full, no_pages, busy, ...), DeadlineExceeded, ConnectionLost;
        after the last two the same call may be repeated: nothing is appended twice.
        """
        session, extras = self._session, asked(sampling, logits, logprobs, bias, mask)
        return session.run(
            lambda: _stepping.step(session.calls, self, token, extras, timeout_s), timeout_s
        )

    def stream(
        self, max_steps: int, stop: Iterable[int] = (), *,
        stop_sequences: Iterable[Iterable[int]] = (), credit: int | None = None,
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, draft: Draft | None = None, timeout_s: float | None = None,
    ) -> Generator[Step, None, None]:  # fmt: skip
        """Decode up to `max_steps` tokens; the daemon runs ahead of the reader by up to `credit`
        (64). Ends after a token of `stop`, or the last one of a sequence of `stop_sequences`; that
        is yielded and not appended.

        A stream that ends for another reason raises RequestRejected after its last step, with the
        code a step would meet: context_full, no_pages, draining, cancelled, epoch_gone.
        Leave the loop whenever you like: the slot then stands where the last step yielded it.
        `bias` and `mask` hold for all its tokens. With a `draft` it is a run of `verify`, with the
        same tokens: "ngram" guesses what followed the last tokens before, or give a `Drafter`. A
        drafted stream does not run ahead (`credit` means nothing to it). `timeout_s` is the longest
        wait for one step. Raises like `step`.
        """
        extras = asked(sampling, False, logprobs, bias, mask)
        if draft is not None:
            drafts = _drafting.start(
                self, max_steps, stop, stop_sequences, draft, extras, timeout_s
            )
            return self._iterate_drafts(drafts, timeout_s)
        reader = _streaming.stream(
            self._session.calls, max_steps, stop, stop_sequences, credit, extras, timeout_s
        )
        return self._iterate(reader, timeout_s)

    def resume_stream(
        self, *, credit: int | None = None, timeout_s: float | None = None
    ) -> Generator[Step, None, None]:
        """Go on with the stream that a broken connection has cut off, from behind the last step it
        yielded: no token is missed or decoded twice. The daemon keeps the stream until the lease is
        over. Raises RequestRejected("position_conflict") without one; else like `stream`."""
        reader = _streaming.resume(self._session.calls, self, credit, timeout_s)
        return self._iterate(reader, timeout_s)

    def _iterate(
        self, reader: StreamReader, timeout_s: float | None
    ) -> Generator[Step, None, None]:
        """The steps of a stream, which begins with the first `next`."""
        session, calls = self._session, self._session.calls
        try:
            while step := session.run(
                lambda: _streaming.stream_next(calls, self, reader), timeout_s, reader
            ):
                yield step
        finally:
            if reader.end is None:
                session.run_now(_streaming.hang_up(calls, self, reader))

    def _iterate_drafts(
        self, reader: DraftReader, timeout_s: float | None
    ) -> Generator[Step, None, None]:
        """The same of drafts that are verified."""
        session, calls = self._session, self._session.calls
        while step := session.run(lambda: _drafting.draft_next(calls, self, reader), timeout_s):
            yield step

    def verify(
        self, draft: Iterable[int], *, token: int | None = None, stop: Iterable[int] = (),
        logprobs: int = 0, sampling: Sampling | None = None, bias: Bias | None = None,
        mask: Mask | None = None, timeout_s: float | None = None,
    ) -> Verified:  # fmt: skip
        """Run a draft behind the slot's next token (or `token`) in one step, and keep what of it
        is right: a token of the draft counts if it is the one that plain steps would have sampled,
        and the tokens that come are those of plain steps, bit for bit.

        The draft may have as many tokens as the largest bucket, less one. A token of `stop` ends
        it, and is not appended. All else is as in `step`, and holds for every token.
        """
        session, extras = self._session, asked(sampling, False, logprobs, bias, mask)
        ids, ends = token_ids(draft, "draft"), token_ids(stop, "stop")
        return session.run(
            lambda: _drafting.verify(session.calls, self, ids, token, ends, extras, timeout_s),
            timeout_s,
        )

    def truncate(self, to: int, *, timeout_s: float | None = None) -> int:
        """Drop all tokens from position `to` on; returns the new length. The next step must name
        its token."""
        session = self._session
        return session.run(lambda: session.calls.truncate(self, to, timeout_s), timeout_s)

    def fork(
        self, *, sampling: Sampling | None = None, key: str | None = None,
        timeout_s: float | None = None,
    ) -> Slot:  # fmt: skip
        """A new slot with the same tokens and the same next `token`, at the cost of one page. From
        there on the two go their own ways.

        `sampling` is that of the new slot; without a seed the daemon draws one, and without
        `sampling` the new slot has that of this one, seed and all, and would go on like it.
        `key`: see `Client.open`. Raises RequestRejected: no_slot, no_pages, busy.
        """
        session = self._session
        forking = Forking(self, sampling, key, timeout_s)
        return session.run(lambda: forking.run(session.calls, partial(Slot, session)), timeout_s)

    def export(
        self, *, piece_bytes: int = _transfer.PIECE_BYTES, timeout_s: float | None = None
    ) -> Pages:
        """The slot as another daemon of the same model can take it (`Client.adopt`), to go on with
        the same bits. Its pages are fetched in pieces of about `piece_bytes` while somebody
        iterates over `pieces`; until then the slot must stay as it is (position_conflict, busy).
        `timeout_s` is the time of each piece. Raises RequestRejected: busy, epoch_gone, too_large.
        """
        session = self._session
        head = session.run(
            lambda: _transfer.begin_export(session.calls, self, piece_bytes, timeout_s), timeout_s
        )
        return head.pages(self._iterate_pages(head, timeout_s))

    def _iterate_pages(self, head: _transfer.Head, timeout_s: float | None) -> Iterator[Piece]:
        session, length = self._session, len(head.tokens)
        for first, count in head.ranges():
            yield session.run(
                partial(
                    _transfer.export_piece, session.calls, self, length, first, count, timeout_s
                ),
                timeout_s,
            )

    def close(self, *, timeout_s: float | None = None) -> None:
        """Give the slot and its pages back; a second time does nothing."""
        session = self._session
        session.run(lambda: session.calls.close(self, timeout_s), timeout_s)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._session.is_closed:
            self.close()
