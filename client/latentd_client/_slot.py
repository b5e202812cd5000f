"""What both clients know of a slot, and how replies are read into it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from latentd_client import packed
from latentd_client._asked import read_logits, read_prompt_logprobs, read_top
from latentd_client._given import whole
from latentd_client.errors import ProtocolError
from latentd_client.results import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from latentd_client._asked import Asked
    from latentd_client._given import Prompt
    from latentd_client._known import Known
    from latentd_client._stream import StreamReader
    from latentd_client.ngram import NgramDrafter
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import PromptLogprobs, Sampling


class BaseSlot:
    """What a client knows of one of its slots.

    `context_len` counts appended tokens; `token` is the last sampled one (None after an empty
    prompt or a truncate), `seed` the one in use; `logprob`, `logits` and `top` are those of the
    prompt's end, `prompt_logprobs` those of its tokens, as far as they were asked for. `prompt` is
    what it was opened with.
    """

    slot_id: int
    epoch: int
    context_len: int
    _opened_in: str  # the session
    _packed_seat: bytes | None

    def __init__(
        self, session: str, header: Header, raw: Sequence[Tensor], prompt: Prompt = (),
        known: Known | None = None,
    ) -> None:  # fmt: skip
        """`known` is kept where slots are opened again."""
        self.sit(session, header)
        self.token: int | None = header.get("token")
        self.seed: int | None = header.get("seed")
        self.cached_tokens: int = header.get("cached_tokens", 0)
        self.logprob: float | None = header.get("logprob")
        self.logits: NDArray[np.float32] | None = read_logits(header, raw)
        self.top = read_top(header.get("top_tokens", ()), header.get("top_logprobs", ()))
        self.prompt_logprobs: PromptLogprobs | None = read_prompt_logprobs(header, raw)
        self.prompt: Prompt = prompt
        self.is_closed = False
        self._known = known
        self._is_forgotten = False  # the daemon no longer has `token`: it must be sent
        self._reader: StreamReader | None = None  # a stream that may still run
        self._drafter: NgramDrafter | None = None  # of its text, once a stream has asked for it

    def sit(self, session: str, header: Header) -> None:
        """Take the seat that a reply names. Raises ProtocolError when it names none."""
        try:
            self.slot_id, self.epoch = header["slot"], header["epoch"]
            self.context_len = header["context_len"]
        except KeyError as error:
            raise ProtocolError(f"the daemon's reply lacks {error}") from None
        self._opened_in, self._packed_seat = session, None
        with contextlib.suppress(packed.NotPacked):
            self._packed_seat = packed.pack_seat(self.slot_id, self.epoch)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"context_len={self.context_len}"
        return f"<{type(self).__name__} {self.slot_id} {state} token={self.token}>"

    @property
    def seat(self) -> Header:
        """The fields that name this slot in a request."""
        return {"slot": self.slot_id, "epoch": self.epoch}

    def row(self, token: int | None, asked: Asked, raw: list[Tensor]) -> Header:
        """The fields of one step, whose tensors are put behind `raw`."""
        row = {"slot": self.slot_id, "epoch": self.epoch, "pos": self.context_len}
        if token is None and self._is_forgotten:
            token = self.token
        if token is not None:
            row["token"] = whole(token, "token")
        return row | asked.fields(raw)

    def place(self, token: int | None) -> tuple[bytes, int, int]:
        """The fields of one step that asks for nothing else, for `packed`. Without a token it names
        the last sampled one. Raises NotPacked."""
        if token is None:
            token = self.token
        if token is None or self._packed_seat is None:
            raise packed.NotPacked
        return self._packed_seat, self.context_len, whole(token, "token")

    def take(self, token: int | None, result: packed.Result) -> Step:
        """Take over the state after a step that appended `token` (None: the last sampled one)."""
        if self._known is not None:
            self._append(token)
        self.context_len, self.token, logprob = result
        self._is_forgotten = False
        # a call of the class takes five times as long
        return Step._make((self.token, self.context_len, logprob, None, False, ()))

    def advance(self, token: int | None, step: Step) -> Step:
        """The same of a step that was read."""
        if self._known is not None:
            self._append(token)
        self.context_len = step.context_len
        self.token = step.token
        self._is_forgotten = False
        return step

    def drop_reader(self) -> None:
        """Forget the stream that may have run: nothing of it comes any more."""
        if self._reader is not None:
            self._reader.leave()
            self._reader = None

    def _append(self, token: int | None) -> None:
        if token is None:
            token = self.token
        if self._known is not None and token is not None:
            self._known.text.append(token)

    def cut(self, length: int) -> None:
        """Take over the state after a truncate."""
        if self._known is not None:
            del self._known.text[length:]
        self.context_len, self.token, self._is_forgotten = length, None, False

    def attended(self, length: int) -> None:
        """Take over a length that attend has made, of latents that the client does not keep."""
        self.context_len, self.token, self._known = length, None, None

    def resample(self, sampling: Sampling | None) -> None:
        """Take note of the sampling parameters that hold from now on, if there are new ones."""
        if sampling is None:
            return
        if sampling.seed is not None:
            self.seed = sampling.seed
        if self._known is not None:
            self._known.sampling = sampling


def slot_pairs(rows: Iterable[tuple[BaseSlot, int | None]]) -> list[tuple[BaseSlot, int | None]]:
    """The rows that a caller gives for a step. Raises ProtocolError."""
    try:
        pairs = [(slot, token) for slot, token in rows]
        if all(isinstance(slot, BaseSlot) for slot, _ in pairs):
            return pairs
    except (TypeError, ValueError):
        pass
    raise ProtocolError(f"rows are {rows!r:.60}, must be pairs of a slot and a token or None")
