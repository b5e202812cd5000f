"""The calls of a stream, for both clients: starting, reading, leaving it early.

Scripts like those of `_calls`. A stream that its reader leaves is settled by the next call on its
slot: it is cancelled, and the tokens that the daemon had run ahead are taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client._exchange import Call
from latentd_client._given import id_lists, token_ids, whole
from latentd_client._stream import StreamReader
from latentd_client.errors import ConnectionLost, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from latentd_client._asked import Asked
    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Step


def stream(
    calls: Calls, slot: BaseSlot, max_steps: int, stop: Iterable[int],
    stop_sequences: Iterable[Iterable[int]], credit: int | None, asked: Asked,
    timeout_s: float | None,
) -> Script[StreamReader]:  # fmt: skip
    """Start a stream on a slot."""
    yield from settle(calls, slot)
    fields: Header = {"session": calls.session, **slot.seat, "pos": slot.context_len}
    fields["max_steps"] = whole(max_steps, "max_steps")
    if slot._is_forgotten:
        fields["token"] = slot.token
    if ids := sorted(set(token_ids(stop, "stop"))):
        fields["stop"] = ids
    if sequences := id_lists(stop_sequences, "stop_sequences"):
        fields["stop_sequences"] = sequences
    fields["deadline_s"] = calls.limit(timeout_s)
    raw: list[Tensor] = []
    fields |= asked.fields(raw)
    return (yield from _read("stream", calls, slot, fields, raw, credit, timeout_s))


def resume(
    calls: Calls, slot: BaseSlot, credit: int | None, timeout_s: float | None
) -> Script[StreamReader]:
    """Go on with the slot's stream behind the last step that its caller has got."""
    fields: Header = {"session": calls.session, **slot.seat, "pos": slot.context_len}
    return (yield from _read("resume", calls, slot, fields, (), credit, timeout_s))


def _read(
    op: str, calls: Calls, slot: BaseSlot, fields: Header, raw: Sequence[Tensor],
    credit: int | None, timeout_s: float | None,
) -> Script[StreamReader]:  # fmt: skip
    """Send a request that is answered by frames, and take the first."""
    assert calls.info is not None
    window = min(calls.info.credits, 64) if credit is None else whole(credit, "credit")
    call = Call(op, {**fields, "credit": window}, raw, timeout_s, is_kept=True)
    before, slot._reader = slot._reader, StreamReader(window, call)
    try:
        reply = yield call
    except RequestRejected:
        slot._reader, before = before, None
        raise
    finally:
        if before is not None:
            before.leave()  # its frames come to this one
    slot._reader.take(reply)
    return slot._reader


def stream_next(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[Step | None]:
    """The next step of a stream, None at its end."""
    if not reader.ready and slot._reader is not reader:
        return None  # another call on the slot has ended it
    while not reader.ready and reader.end is None:
        try:
            reader.take((yield reader.pending))
        except RequestRejected:
            slot._reader = None
            raise
    if not reader.ready:
        slot._reader = None
        reader.check_end()
        return None
    step = slot.advance(reader.ready.popleft())
    grant = reader.consume()
    if grant:
        fields = {"session": calls.session, "stream": reader.pending.request_id, "n": grant}
        yield Call("credit", fields, expect=False)
    return step


def hang_up(calls: Calls, slot: BaseSlot) -> Script[None]:
    """Tell the daemon that nobody reads the slot's stream any more; does not wait."""
    reader = slot._reader
    if reader is not None and reader.end is None:
        request = {"session": calls.session, "request": reader.pending.request_id}
        yield Call("cancel", request, expect=False)


def settle(calls: Calls, slot: BaseSlot) -> Script[None]:
    """End what is left of a stream that the caller has left, and take back the tokens that
    the daemon had run ahead: the slot is where the caller's last step was."""
    reader = slot._reader
    if reader is None:
        return
    length = yield from _end_stream(calls, slot, reader)
    reader.leave()
    if length > slot.context_len:
        fields = {"session": calls.session, **slot.seat, "pos": length, "to": slot.context_len}
        slot._is_forgotten = True  # also if the reply is lost: it may have run all the same
        yield Call("truncate", fields)
    slot._reader = None
    reader.ready.clear()


def _end_stream(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[int]:
    """The slot's true length once the stream has ended."""
    if reader.end is None and reader.call.pending is not None:
        request = {"session": calls.session, "request": reader.pending.request_id}
        reply = yield Call("cancel", request)
        try:
            while reader.pending.replies or (reply.header.get("known") and not reader.end):
                reader.take((yield reader.pending))
        except (RequestRejected, ConnectionLost):
            pass  # its length is asked for below
    if reader.end is not None:
        return reader.context_len
    while True:
        reply = yield Call("resume", {"session": calls.session})
        seats = {(seat["slot"], seat["epoch"]): seat for seat in reply.header["slots"]}
        seat = seats.get((slot.slot_id, slot.epoch))
        if seat is None:
            raise RequestRejected("epoch_gone", f"slot {slot.slot_id} is not open any more")
        if not seat["busy"]:  # else the last steps of the stream are still running
            return int(seat["context_len"])
