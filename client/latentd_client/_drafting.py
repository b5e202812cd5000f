"""Verifications, and streams made of them: the calls of both clients for speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from latentd_client._asked import read_top
from latentd_client._given import stop_ids, token_ids
from latentd_client._reopening import ready
from latentd_client._request import Call
from latentd_client._stream import Ending, StreamReader, Wanted
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
    yield from ready(calls, slot)
    ids, stops = token_ids(draft, "draft"), stop_ids(stop)
    verified = yield from _ask(calls, slot, ids, token, stops, asked, timeout_s)
    for step in verified.steps:
        slot.advance(token, step)
        token = None
    return verified


def _ask(
    calls: Calls, slot: BaseSlot, draft: list[int], token: int | None, stop: list[int],
    asked: Asked, timeout_s: float | None,
) -> Script[Verified]:  # fmt: skip
    """What a draft brings; for the caller the slot stays where it is."""
    raw: list[Tensor] = []
    fields: Header = {"session": calls.session, **slot.row(token, asked, raw)}
    fields["draft"] = draft
    if stop:
        fields["stop"] = stop
    fields["deadline_s"] = calls.limit(timeout_s)
    reply = yield from calls.ask(Call("verify", fields, raw, timeout_s))
    verified = _read(reply.header, slot.context_len)
    slot.resample(asked.sampling)
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
    first, as in other streams. A draft has at most `room` tokens: one more than the last one had
    right ones, or twice as many if it was right as a whole. `unanswered` is the one that was sent.
    """

    def __init__(self, drafter: Drafter, asks: Wanted, timeout_s: float | None) -> None:
        super().__init__(0, Call("verify", {}), None, timeout_s)
        self.drafter = drafter
        self.asks = asks
        self.ending = Ending(asks.stop, asks.sequences)
        self.room = MOST_DRAFT
        self.unanswered: list[int] | None = None
        self.end = "verified"

    @property
    def left(self) -> int:
        """How many tokens are still wanted, beside those that are ready."""
        return 0 if self.is_over else self.asks.max_steps - self.handed - len(self.ready)


def start(
    slot: BaseSlot, max_steps: int, stop: Iterable[int],
    stop_sequences: Iterable[Iterable[int]], draft: Draft, asked: Asked, timeout_s: float | None,
) -> DraftReader:  # fmt: skip
    """The reader of a stream that is yet to begin."""
    asks = Wanted.given(max_steps, stop, stop_sequences, asked)
    return DraftReader(_drafter(slot, draft), asks, timeout_s)


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
        yield from _verify_draft(calls, slot, reader)
    step = slot.advance(None, reader.hand_out())
    reader.drafter.push(step.token)
    if reader.is_over:
        reader.ready.clear()
    return step


def _verify_draft(calls: Calls, slot: BaseSlot, reader: DraftReader) -> Script[None]:
    """Fill `ready` with what a draft has brought. As far as the caller knows the slot is where it
    was, until it is given the steps."""
    if slot._reader is not reader or slot._opened_in is not calls.session:
        yield from ready(calls, slot)
    if reader.unanswered is None:
        reader.unanswered = _guess(calls, slot, reader)
    # From here on it may run, whatever becomes of the call: the next one on the slot asks how far.
    reader.end, slot._reader = None, reader
    try:
        verified = yield from _verify_what_fits(calls, slot, reader)
    except RequestRejected as error:
        if not calls.survives(error):
            slot._reader = reader.unanswered = None
        raise
    if draft := reader.unanswered:
        is_right = verified.accepted == len(draft)
        reader.room = min(MOST_DRAFT, 2 * reader.room if is_right else verified.accepted + 1)
    reader.unanswered, reader.end = None, "verified"
    reader.ready.extend(verified.steps)
    reader.context_len = verified.context_len


def _guess(calls: Calls, slot: BaseSlot, reader: DraftReader) -> list[int]:
    room = min(
        reader.room, reader.left - 1, calls.info.buckets[-1] - 1,
        calls.info.max_ctx - slot.context_len - 1,
    )  # fmt: skip
    return list(reader.drafter.draft(room))[:room] if room > 0 else []


def _verify_what_fits(calls: Calls, slot: BaseSlot, reader: DraftReader) -> Script[Verified]:
    """Verify the draft, or where there are no pages for it, a plain step."""
    rest = (None, reader.asks.stop, reader.asks.asked, reader.timeout_s)
    try:
        return (yield from _ask(calls, slot, reader.unanswered or [], *rest))
    except RequestRejected as refusal:
        if refusal.code != "no_pages" or not reader.unanswered:
            raise
    reader.unanswered = []
    return (yield from _ask(calls, slot, [], *rest))
