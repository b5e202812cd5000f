"""Verifications, and streams made of them: the calls of both clients for speculative decoding."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from latentd_client._asked import read_top
from latentd_client._exchange import Call
from latentd_client._given import id_lists, token_ids, whole
from latentd_client._stream import StreamReader
from latentd_client._streaming import settle
from latentd_client.errors import ProtocolError, RequestRejected
from latentd_client.ngram import Drafter, NgramDrafter
from latentd_client.results import Step, Verified

if TYPE_CHECKING:
    from collections.abc import Iterable

    from latentd_client._asked import Asked
    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor

Draft: TypeAlias = "str | Drafter"

MOST_DRAFT: Final = 7
"""Most tokens of a stream's drafts: with the token in front a step of eight rows."""


def verify(
    calls: Calls, slot: BaseSlot, draft: Iterable[int], token: int | None, stop: Iterable[int],
    asked: Asked, timeout_s: float | None,
) -> Script[Verified]:  # fmt: skip
    """Run a draft behind the slot's next token."""
    yield from settle(calls, slot)
    raw: list[Tensor] = []
    fields: Header = {"session": calls.session, **slot.row(token, asked, raw)}
    fields["draft"] = token_ids(draft, "draft")
    if stop_ids := sorted(set(token_ids(stop, "stop"))):
        fields["stop"] = stop_ids
    fields["deadline_s"] = calls.limit(timeout_s)
    reply = yield Call("verify", fields, raw, timeout_s)
    verified = _read(reply.header, slot.context_len)
    slot.advance(verified.steps[-1])
    return verified


def _read(header: Header, pos: int) -> Verified:
    """Raises ProtocolError when a field is missing or does not fit."""
    try:
        tokens, replayed = header["tokens"], bool(header.get("replayed"))
        tops = [read_top(*top) for top in _tops(header)] or [()] * len(tokens)
        rows = zip(tokens, header["logprobs"], tops, strict=True)
        steps = tuple(
            Step(token, pos + 1 + n, logprob, None, replayed, top)
            for n, (token, logprob, top) in enumerate(rows)
        )
        if not steps or steps[-1].context_len != header["context_len"]:
            raise ValueError(header["context_len"])
        return Verified(int(header["accepted"]), steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the daemon's reply to verify is broken: {error!r}") from None


def _tops(header: Header) -> list[tuple[list[int], list[float]]]:
    names = header.get("top_tokens", ()), header.get("top_logprobs", ())
    return list(zip(*names, strict=True))


class DraftReader(StreamReader):
    """A stream of verified drafts, of which nothing runs at the daemon between two calls. What of a
    verification the caller has not yet got lies in `ready`, and is taken back if another call comes
    first, as in other streams. `left` tokens are still wanted. A draft has at most `room` tokens:
    one more than the last one had right ones, or twice as many if it was right as a whole."""

    def __init__(
        self, drafter: Drafter, left: int, stop: list[int], sequences: list[list[int]],
        asked: Asked, timeout_s: float | None,
    ) -> None:  # fmt: skip
        super().__init__(0, Call("verify", {}))
        self.drafter = drafter
        self.left = left
        self.room = MOST_DRAFT
        self.stop = stop
        self.asked = asked
        self.timeout_s = timeout_s
        self.end = "verified"
        self._sequences = sequences
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences), default=0))

    def hand_out(self) -> Step:
        """The next step of those that are ready; none comes behind one that stops the stream."""
        step = self.ready.popleft()
        self.drafter.push(step.token)
        self._tail.append(step.token)
        tail = list(self._tail)
        if step.token in self.stop or any(tail[-len(ids) :] == ids for ids in self._sequences):
            self.left = 0
            self.ready.clear()
        return step


def start(
    calls: Calls, slot: BaseSlot, max_steps: int, stop: Iterable[int],
    stop_sequences: Iterable[Iterable[int]], draft: Draft, asked: Asked, timeout_s: float | None,
) -> Script[DraftReader]:  # fmt: skip
    """Begin a stream; nothing is sent but what ends the one before."""
    yield from settle(calls, slot)
    stop_ids, sequences = token_ids(stop, "stop"), id_lists(stop_sequences, "stop_sequences")
    left = whole(max_steps, "max_steps")
    return DraftReader(_drafter(slot, draft), left, stop_ids, sequences, asked, timeout_s)


def _drafter(slot: BaseSlot, draft: Draft) -> Drafter:
    """The caller's own drafter, or that of the slot, which knows its text from the prompt on."""
    if draft != "ngram":
        if isinstance(draft, str) or not hasattr(draft, "draft"):
            raise ProtocolError(f"draft is {draft!r:.40}, must be 'ngram' or a Drafter")
        return draft
    if slot._drafter is None:
        slot._drafter = NgramDrafter(slot.prompt)
        if slot.token is not None:
            slot._drafter.push(slot.token)
    return slot._drafter


def draft_next(calls: Calls, slot: BaseSlot, reader: DraftReader) -> Script[Step | None]:
    """The next step of a stream, None at its end."""
    if reader.context_len and slot._reader is not reader:
        return None  # another call on the slot has ended it
    if not reader.ready:
        if reader.left <= 0:
            return None
        slot._reader = None
        yield from _verify_draft(calls, slot, reader)
    return slot.advance(reader.hand_out())


def _verify_what_fits(
    calls: Calls, slot: BaseSlot, reader: DraftReader, draft: list[int]
) -> Script[Verified]:
    """Verify a draft, or where there are no pages for it, a plain step."""
    rest = (reader.stop, reader.asked, reader.timeout_s)
    try:
        return (yield from verify(calls, slot, draft, None, *rest))
    except RequestRejected as refusal:
        if refusal.code != "no_pages" or not draft:
            raise
    return (yield from verify(calls, slot, (), None, *rest))


def _verify_draft(calls: Calls, slot: BaseSlot, reader: DraftReader) -> Script[None]:
    """Fill `ready` with what a draft has brought."""
    assert calls.info is not None
    room = min(
        reader.room, reader.left - 1, calls.info.buckets[-1] - 1,
        calls.info.max_ctx - slot.context_len - 1,
    )  # fmt: skip
    draft = list(reader.drafter.draft(room))[:room] if room > 0 else []
    before, token, is_forgotten = slot.context_len, slot.token, slot._is_forgotten
    try:
        verified = yield from _verify_what_fits(calls, slot, reader, draft)
    except RequestRejected:
        raise
    except BaseException:  # it may run all the same: the next call on the slot asks how far it is
        reader.end, slot._reader = None, reader
        raise
    if draft:
        is_right = verified.accepted == len(draft)
        reader.room = min(MOST_DRAFT, 2 * reader.room if is_right else verified.accepted + 1)
    reader.ready.extend(verified.steps)
    reader.left -= len(verified.steps)
    reader.context_len = slot.context_len
    # As far as the caller knows the slot is where it was, until it is given the steps.
    slot.context_len, slot.token, slot._is_forgotten = before, token, is_forgotten
    slot._reader = reader
