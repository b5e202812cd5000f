"""The calls of a step, of one slot or several, for both clients; scripts like those of `_calls`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from latentd_client import packed
from latentd_client._asked import NOTHING, name_masks, read_step
from latentd_client._reopening import ready
from latentd_client._request import Call, refusal
from latentd_client.errors import ProtocolError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd_client._asked import Asked
    from latentd_client._calls import Calls, Script
    from latentd_client._given import Mask
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Step


def step(
    calls: Calls, slot: BaseSlot, token: int | None, asked: Asked, timeout_s: float | None
) -> Script[Step]:
    """One step of one slot."""
    if slot._reader is not None or slot._opened_in is not calls.session:
        yield from ready(calls, slot)
    if (call := _packed_step(calls, slot, token, asked, timeout_s)) is None:
        raw: list[Tensor] = []
        fields = slot.row(token, asked, raw)
        fields["session"] = calls.session
        fields["deadline_s"] = calls.limit(timeout_s)
        call = Call("step", fields, raw, timeout_s)
    reply = yield from calls.ask(call)
    slot.resample(asked.sampling)
    if reply.results is not None:
        return slot.take(token, reply.results[0])
    return slot.advance(token, read_step(reply.header, reply.raw))


def _packed_step(
    calls: Calls, slot: BaseSlot, token: int | None, asked: Asked, timeout_s: float | None
) -> Call | None:
    """The same in the fixed layout; None if it does not fit in."""
    if asked is not NOTHING or len(calls.session_bytes) != packed.SESSION_BYTES:
        return None
    try:
        seat, pos, token = slot.place(token)
        step = packed.pack_step(calls.session_bytes, calls.limit(timeout_s), seat, pos, token)
    except packed.NotPacked:
        return None
    return Call("step", {}, (), timeout_s, packed=step)


def step_rows(
    calls: Calls, pairs: Sequence[tuple[BaseSlot, int | None]], asked: Asked,
    masks: Sequence[Mask | None] | None, timeout_s: float | None,
) -> Script[list[Step]]:  # fmt: skip
    """One step of several slots, in one request."""
    for slot, _ in pairs:
        if slot._reader is not None or slot._opened_in is not calls.session:
            yield from ready(calls, slot)
    call = _rows_call(calls, pairs, asked, masks, timeout_s)
    header, raw, results = yield from calls.ask(call)
    if results is not None and len(results) == len(pairs):
        rows = zip(pairs, results, strict=True)
        return [slot.take(token, row) for (slot, token), row in rows]
    given = header.get("rows")
    if not isinstance(given, list) or len(given) != len(pairs):
        raise ProtocolError("the daemon's reply to step has another number of rows")
    return _read_rows(pairs, given, raw)


def _rows_call(
    calls: Calls, pairs: Sequence[tuple[BaseSlot, int | None]], asked: Asked,
    masks: Sequence[Mask | None] | None, timeout_s: float | None,
) -> Call:  # fmt: skip
    limit_s = calls.limit(timeout_s)
    if asked is NOTHING and masks is None and len(calls.session_bytes) == packed.SESSION_BYTES:
        with contextlib.suppress(packed.NotPacked):
            places = [slot.place(token) for slot, token in pairs]
            steps = packed.pack_steps(calls.session_bytes, limit_s, places)
            return Call("step", {}, (), timeout_s, packed=steps)
    raw: list[Tensor] = []
    made = [slot.row(token, asked, raw) for slot, token in pairs]
    if masks is not None:
        name_masks(masks, made, raw)
    fields = {"session": calls.session, "rows": made, "deadline_s": limit_s}
    return Call("step", fields, raw, timeout_s)


def _read_rows(
    pairs: Sequence[tuple[BaseSlot, int | None]], rows: Sequence[Header], raw: Sequence[Tensor]
) -> list[Step]:
    """Take over each row's result, then raise the first refusal if there is one."""
    steps: list[Step] = []
    outcomes: list[Step | RequestRejected] = []
    for (slot, token), result in zip(pairs, rows, strict=True):
        if result.get("status") == "ok":
            steps.append(slot.advance(token, read_step(result, raw)))
            outcomes.append(steps[-1])
        else:
            outcomes.append(refusal(result))
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, RequestRejected):
            text = f"row {index} of {len(pairs)}: {outcome}"
            raise RequestRejected(outcome.code, text, **outcome.detail, rows=outcomes)
    return steps
