"""The reading end of a stream: steps that have arrived, and the credit to grant."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd_client._asked import read_top
from latentd_client._given import id_lists, stop_ids, whole
from latentd_client.errors import ConnectionLost, ProtocolError, RequestRejected
from latentd_client.results import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from latentd_client._asked import Asked
    from latentd_client._request import Call, Pending, Reply


class Ending:
    """Tells when the tokens that were handed out end a stream: by one of `stop`, or as one of
    `sequences`."""

    def __init__(self, stop: Iterable[int] = (), sequences: Sequence[list[int]] = ()) -> None:
        self.stop = frozenset(stop)
        self.sequences = sequences
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences), default=0))

    def push(self, token: int) -> bool:
        """Take note of the next token; whether it is the last one."""
        self._tail.append(token)
        if token in self.stop:
            return True
        tail = list(self._tail)
        return any(tail[-len(ids) :] == ids for ids in self.sequences)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a stream was asked for."""

    max_steps: int
    stop: list[int]
    sequences: list[list[int]]
    asked: Asked

    @classmethod
    def given(
        cls, max_steps: int, stop: Iterable[int], stop_sequences: Iterable[Iterable[int]],
        asked: Asked,
    ) -> Wanted:  # fmt: skip
        """The same, of a caller's arguments. Raises ProtocolError."""
        return cls(
            whole(max_steps, "max_steps"), stop_ids(stop),
            id_lists(stop_sequences, "stop_sequences"), asked,
        )  # fmt: skip


class StreamReader:
    """One stream. `window` tokens may be on their way or unread; the daemon is granted more when
    half of them are consumed. `end` is None while it runs; `context_len` is the slot's length at
    the daemon as of the last frame.

    One that `is_cut` must be begun, or gone on with, before anything comes. `handed` steps were
    given to the caller, `begun` of them before the request that runs now (-1: nobody knows which);
    it `follows` the reader that it resumes, and its `heir` is the one for which it is to end. Until
    that request is answered, one of those whose ids are `older` may still have the stream.
    `is_over`: the last step ended what was `wanted`.
    """

    def __init__(
        self, window: int, call: Call | None = None, wanted: Wanted | None = None,
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """`call` is the request whose replies are the frames; without one it is cut."""
        self.window = window
        self.wanted = wanted
        self.timeout_s = timeout_s
        self.is_cut = call is None
        self.is_over = False
        self.handed = self.begun = 0
        self.follows: StreamReader | None = None
        self.heir: StreamReader | None = None
        self.older: list[int] = []
        self.ending = Ending(wanted.stop, wanted.sequences) if wanted is not None else Ending()
        self.context_len = 0
        self.ready: deque[Step] = deque()
        self.call: Call | None = None
        self.restart(call)

    def restart(self, call: Call | None) -> None:
        """Read another request's frames from now on."""
        self.leave()
        self.call = call
        self.ready.clear()
        self.end: str | None = None
        self._consumed = 0
        self._next_pos: int | None = None  # of the first token of the next frame

    @property
    def pending(self) -> Pending:
        """The request on its way."""
        if self.call is None or self.call.pending is None:
            raise ProtocolError("the stream was not sent")
        return self.call.pending

    @property
    def is_sent(self) -> bool:
        """Whether a request is on its way, or was."""
        return self.call is not None and self.call.pending is not None

    @property
    def requests(self) -> list[int]:
        """The ids of all that may have the stream."""
        return self.older + ([self.pending.request_id] if self.is_sent else [])

    @property
    def is_awaited(self) -> bool:
        """Whether frames of that request may still come."""
        return self.call is not None and self.call.pending is not None and self.call.pending.is_open

    @property
    def is_at_hand(self) -> bool:
        """Whether the next step has come, or the end: neither needs the connection."""
        if self.is_cut or self.call is None or self.call.pending is None:
            return False
        return bool(self.ready or self.call.pending.replies) or self.end is not None

    def leave(self) -> None:
        """Expect nothing of it any more; again is harmless."""
        if self.call is not None and self.call.pending is not None:
            self.call.pending.abandon()

    def check_end(self) -> None:
        """Raise RequestRejected when the stream ended before its time."""
        if self.end in ("context_full", "no_pages", "cancelled", "draining"):
            raise RequestRejected(
                self.end, f"the stream ended at length {self.context_len}: {self.end}"
            )
        if self.end == "closed":
            raise RequestRejected("epoch_gone", "the stream ended: its slot was closed")

    def take(self, reply: Reply) -> None:
        """Take one frame over. Raises ProtocolError when it lacks a field, ConnectionLost when one
        before it never came here."""
        header = reply.header
        try:
            pos, replayed = header["pos"], bool(header.get("replayed"))
            pairs = zip(header["tokens"], header["logprobs"], strict=True)
            steps = [
                Step._make((token, pos + i, logprob, None, replayed, ()))
                for i, (token, logprob) in enumerate(pairs)
            ]
            if "top_tokens" in header:
                tops = zip(header["top_tokens"], header["top_logprobs"], strict=True)
                steps = [
                    step._replace(top=read_top(*top)) for step, top in zip(steps, tops, strict=True)
                ]
            if self._next_pos not in (None, pos):
                raise ConnectionLost(
                    f"the stream goes on at length {pos} after {self._next_pos}: a frame was lost "
                    "to an interrupt; the slot goes on from the last token that was handed out"
                )
            self._next_pos = pos + len(steps)
            self.ready.extend(steps)
            self.context_len = header["context_len"]
            if not header.get("more"):
                self.end = header["end"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the daemon's stream frame is broken: {error!r}") from None

    def hand_out(self) -> Step:
        """The next step of those that are ready."""
        step = self.ready.popleft()
        self.handed += 1
        self.is_over = self.ending.push(step.token)
        return step

    def consume(self) -> int:
        """One step was handed out; returns how many tokens to grant now, mostly 0."""
        self._consumed += 1
        if self.end is not None or self._consumed * 2 < self.window:
            return 0
        grant, self._consumed = self._consumed, 0
        return grant
