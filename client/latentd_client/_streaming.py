"""The calls of a stream, for both clients: beginning it, reading, going on, leaving it early.

Scripts like those of `_calls`. A stream that its reader leaves is settled by the next call on its
slot (see `_settling`): it is cancelled, and the tokens that the daemon had run ahead are taken
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client._given import whole
from latentd_client._reopening import reopen
from latentd_client._request import Call
from latentd_client._settling import settle
from latentd_client._stream import StreamReader, Wanted
from latentd_client.errors import ConnectionLost, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from latentd_client._asked import Asked
    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Step


def stream(
    calls: Calls, max_steps: int, stop: Iterable[int], stop_sequences: Iterable[Iterable[int]],
    credit: int | None, asked: Asked, timeout_s: float | None,
) -> StreamReader:  # fmt: skip
    """The reader of a stream that is yet to begin."""
    wanted = Wanted.given(max_steps, stop, stop_sequences, asked)
    return StreamReader(_window(calls, credit), None, wanted, timeout_s)


def resume(
    calls: Calls, slot: BaseSlot, credit: int | None, timeout_s: float | None
) -> StreamReader:
    """The reader of the rest of the slot's stream, behind the last step that its caller has got."""
    running = slot._reader
    before = running if running is None or running.heir is None else running.heir
    wanted = None if before is None else before.wanted
    reader = StreamReader(_window(calls, credit), None, wanted, timeout_s)
    if before is not None:
        reader.handed, reader.ending, reader.is_over = before.handed, before.ending, before.is_over
    reader.begun = -1 if before is None else before.begun
    reader.follows = before
    return reader


def _window(calls: Calls, credit: int | None) -> int:
    return min(calls.info.credits, 64) if credit is None else whole(credit, "credit")


def stream_next(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[Step | None]:
    """The next step of a stream, None at its end."""
    if reader.is_over and reader.begun > 0:
        return None  # by a stop sequence of which the daemon that goes on knows a part only
    if reader.is_cut:
        yield from _begin(calls, slot, reader)
    elif not reader.ready and slot._reader is not reader:
        return None  # another call on the slot has ended it
    try:
        while not reader.ready and reader.end is None:
            reader.take((yield reader.pending))
        if not reader.ready:
            reader.check_end()
    except (ConnectionLost, RequestRejected) as error:
        reader.is_cut = calls.survives(error)
        if isinstance(error, RequestRejected) and not reader.is_cut:
            slot._reader = None
        raise
    if not reader.ready:
        slot._reader = None
        return None
    step = slot.advance(None, reader.hand_out())
    grant = reader.consume()
    if grant:
        fields = {"session": calls.session, "stream": reader.pending.request_id, "n": grant}
        yield Call("credit", fields, expect=False)
    return step


def _begin(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[None]:
    """Begin a stream; or go on, behind the last step that its caller has got, with one that was cut
    off: the same stream where the daemon still has it, else a new one with what is left of it."""
    is_new = slot._opened_in is not calls.session or reader.end is not None
    if slot._opened_in is not calls.session:
        yield from reopen(calls, slot)
        slot.drop_reader()
    elif slot._reader is not None and slot._reader not in (reader, reader.follows):
        slot._reader.heir = reader
        yield from settle(calls, slot)
    wanted = reader.wanted
    if is_new and wanted is None:
        raise RequestRejected("position_conflict", f"slot {slot.slot_id} has no stream to go on")
    if is_new and wanted is not None and (reader.is_over or reader.handed >= wanted.max_steps):
        reader.end, reader.is_cut = "over", False
        return
    if wanted is None or (not is_new and reader.begun != reader.handed):
        fields: Header = {"session": calls.session, **slot.seat, "pos": slot.context_len}
        yield from _read("resume", slot, reader, fields, [])
        return
    reader.begun = reader.handed
    raw: list[Tensor] = []
    yield from _read("stream", slot, reader, _fields(calls, slot, reader, wanted, raw), raw)
    slot.resample(wanted.asked.sampling)


def _fields(
    calls: Calls, slot: BaseSlot, reader: StreamReader, wanted: Wanted, raw: list[Tensor]
) -> Header:
    """Of the request for what is left of a stream."""
    fields: Header = {"session": calls.session, **slot.seat, "pos": slot.context_len}
    fields["max_steps"] = wanted.max_steps - reader.handed
    if slot._is_forgotten:
        fields["token"] = slot.token
    if wanted.stop:
        fields["stop"] = wanted.stop
    if wanted.sequences:
        fields["stop_sequences"] = wanted.sequences
    fields["deadline_s"] = calls.limit(reader.timeout_s)
    return fields | wanted.asked.fields(raw)


def _read(
    op: str, slot: BaseSlot, reader: StreamReader, fields: Header, raw: list[Tensor]
) -> Script[None]:
    """Send a request that is answered by frames, and take the first."""
    call = Call(op, {**fields, "credit": reader.window}, raw, reader.timeout_s, is_kept=True)
    before, slot._reader = slot._reader, reader
    older = [] if before is None else before.requests
    reader.restart(call)
    reader.older = older
    try:
        reply = yield call
    except RequestRejected:
        slot._reader, before = before, None
        raise
    finally:
        if before is not None and before is not reader:
            before.leave()  # its frames come to this one
    reader.take(reply)
    reader.is_cut, reader.follows, reader.older = False, None, []


def hang_up(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[None]:
    """Tell the daemon that nobody reads a stream any more; does not wait. One that goes on with
    another reader, or was cut off with its connection and may still do so, is left alone."""
    if slot._reader is reader and reader.end is None and reader.is_awaited:
        request = {"session": calls.session, "request": reader.pending.request_id}
        yield Call("cancel", request, expect=False)
