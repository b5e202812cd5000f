"""A slot of the blocking client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client import _forking, _streaming
from latentd_client._slot import BaseSlot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._stream import StreamReader
    from latentd_client.client import Client
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling, Step


class Slot(BaseSlot):
    """A sequence's seat in the daemon, made by `Client.open`. As a context manager it closes."""

    def __init__(self, client: Client, header: Header, raw: Sequence[Tensor]) -> None:
        super().__init__(header, raw)
        self._client = client

    def step(
        self, token: int | None = None, *, logits: bool = False,
        sampling: Sampling | None = None, timeout_s: float | None = None,
    ) -> Step:  # fmt: skip
        """Append one token (the last sampled one without `token`) and sample the next.

        `logits` asks for float32 [vocab_size]; `sampling` holds for this step only. Raises
        RequestRejected (context_full, no_pages, busy, ...), DeadlineExceeded, ConnectionLost;
        after the last two the same call may be repeated: nothing is appended twice.
        """
        calls = self._client._calls
        return self._client._run(calls.step(self, token, logits, sampling, timeout_s), timeout_s)

    def stream(
        self, max_steps: int, stop: Iterable[int] = (), *,
        stop_sequences: Iterable[Iterable[int]] = (), credit: int | None = None,
        sampling: Sampling | None = None, timeout_s: float | None = None,
    ) -> Iterator[Step]:  # fmt: skip
        """Decode up to `max_steps` tokens; the daemon runs ahead of the reader by up to `credit`
        (64). Ends after a token of `stop`, or the last one of a sequence of `stop_sequences`; that
        is yielded and not appended.

        A stream that ends for another reason raises RequestRejected after its last step, with the
        code a step would meet: context_full, no_pages, draining, cancelled, epoch_gone.
        Leave the loop whenever you like: the slot then stands where the last step yielded it.
        `timeout_s` is the longest wait for one step. Raises like `step`.
        """
        return self._iterate(
            _streaming.stream(
                self._client._calls, self, max_steps, stop, stop_sequences, credit, sampling,
                timeout_s,
            ),
            timeout_s,
        )  # fmt: skip

    def resume_stream(
        self, *, credit: int | None = None, timeout_s: float | None = None
    ) -> Iterator[Step]:
        """Go on with the stream that a broken connection has cut off, from behind the last step it
        yielded: no token is missed or decoded twice. The daemon keeps the stream until the lease is
        over. Raises RequestRejected("position_conflict") without one; else like `stream`."""
        start = _streaming.resume(self._client._calls, self, credit, timeout_s)
        return self._iterate(start, timeout_s)

    def _iterate(self, start: Script[StreamReader], timeout_s: float | None) -> Iterator[Step]:
        """The steps of a stream, from the first `next` on."""
        client = self._client
        calls = client._calls
        reader = client._run(start, timeout_s)
        try:
            while True:
                step = client._run(_streaming.stream_next(calls, self, reader), timeout_s)
                if step is None:
                    return
                yield step
        finally:
            if reader.end is None:
                client._run_now(_streaming.hang_up(calls, self))

    def truncate(self, to: int, *, timeout_s: float | None = None) -> int:
        """Drop all tokens from position `to` on; returns the new length. The next step must name
        its token."""
        return self._client._run(self._client._calls.truncate(self, to, timeout_s), timeout_s)

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
        client = self._client
        script = _forking.fork(
            client._calls, lambda header, raw: Slot(client, header, raw), self, sampling, key,
            timeout_s,
        )  # fmt: skip
        return client._run(script, timeout_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Give the slot and its pages back; a second time does nothing."""
        self._client._run(self._client._calls.close(self, timeout_s), timeout_s)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._client.is_closed:
            self.close()
