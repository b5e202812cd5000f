"""Ending a stream that its reader has left, for both clients; scripts like those of `_calls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client._request import Call
from latentd_client.errors import ConnectionLost, RequestRejected

if TYPE_CHECKING:
    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client._stream import StreamReader


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


def _cancel(calls: Calls, reader: StreamReader) -> Script[None]:
    """Have the daemon end a stream, whichever of its requests has got there."""
    if reader.is_sent:
        request = {"session": calls.session, "request": reader.pending.request_id}
        reply = yield Call("cancel", request)
        try:
            while reader.pending.replies or (reply.header.get("known") and not reader.end):
                reader.take((yield reader.pending))
        except (RequestRejected, ConnectionLost):
            pass  # its length is asked for
        if reply.header.get("known"):
            return
    while reader.older:
        reply = yield Call("cancel", {"session": calls.session, "request": reader.older[-1]})
        reader.older.pop()  # not again, should the next reply be lost
        if reply.header.get("known"):
            return


def _end_stream(calls: Calls, slot: BaseSlot, reader: StreamReader) -> Script[int]:
    """The slot's true length once the stream has ended."""
    if reader.end is None:
        yield from _cancel(calls, reader)
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
