"""The step request: one row, or several, each admitted or refused alone.

`is_plain` recognises the usual header in one pass; whatever it does not is checked field by field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.replies import RowsTicket, Ticket
from latentd.requests_admit import check_idle, read_sampling
from latentd.runs import StepRun
from latentd_client import fields, protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.sessions import Session
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

_HIGH: Final = {field.name: field.high for field in (*fields.OPS["step"], *fields.STEP_ROWS)}
_MAX_SLOT, _MAX_EPOCH, _MAX_POS = int(_HIGH["slot"]), int(_HIGH["epoch"]), int(_HIGH["pos"])
_MAX_TOKEN, _MAX_ROWS = int(_HIGH["token"]), int(_HIGH["rows"])
_MAX_SESSION, _MAX_DEADLINE_S = int(_HIGH["session"]), float(_HIGH["deadline_s"])


def is_plain(header: Header) -> bool:
    """Whether a header with a readable id is a well-formed step without raw frames, sampling or any
    unknown field: then all of the general checks would pass. Plain comparisons: sets of names and
    types, and columns of rows, were tried and take twice as long."""
    get = header.get
    session, version, deadline_s = get("session"), get("v"), get("deadline_s")
    if (
        get("op") != "step"
        or type(version) is not int
        or version != protocol.VERSION
        or type(session) is not str
        or not 1 <= len(session) <= _MAX_SESSION
    ):
        return False
    known = 4  # v, id, op, session
    if deadline_s is not None:
        if type(deadline_s) is not float and type(deadline_s) is not int:
            return False
        if not 0 <= deadline_s <= _MAX_DEADLINE_S:  # false for NaN too
            return False
        known = 5
    rows = get("rows")
    if rows is None:
        return _is_plain_row(header, known)
    if type(rows) is not list or not 1 <= len(rows) <= _MAX_ROWS or len(header) != known + 1:
        return False
    return all(type(row) is dict and _is_plain_row(row, 0) for row in rows)


def _is_plain_row(row: Header, known: int) -> bool:
    """The same of one row; `known` counts the fields of its map that were looked at before."""
    get = row.get
    slot, epoch, pos, token = get("slot"), get("epoch"), get("pos"), get("token")
    if (
        type(slot) is not int
        or type(epoch) is not int
        or type(pos) is not int
        or not (0 <= slot <= _MAX_SLOT and 0 <= epoch <= _MAX_EPOCH and 0 <= pos <= _MAX_POS)
    ):
        return False
    known += 3
    if token is not None:
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
            return False
        known += 1
    return len(row) == known or (len(row) == known + 1 and type(get("logits")) is bool)


def step(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Queue one row, or several, each admitted or refused alone."""
    session = work.sessions.renew(header["session"], work.now)
    rows, deadline_s = header.get("rows"), header.get("deadline_s")
    may_launch = not work.is_draining and (deadline_s is None or deadline_s > 0)
    if rows is None:
        one = Ticket(work.outbox, peer, request_id)
        if _step_row(work, session, header, may_launch, deadline_s, one, 0):
            work.early.append((one, header["pos"] + 1))
        return None
    ticket = RowsTicket(work.outbox, peer, request_id, len(rows))
    for index, row in enumerate(rows):
        try:
            _step_row(work, session, row, may_launch, deadline_s, ticket, index)
        except RequestRejected as refusal:
            ticket.refuse(index, refusal)
    return None


def _step_row(
    work: Work, session: Session, row: Header, may_launch: bool, deadline_s: float | None,
    ticket: Ticket | RowsTicket, index: int,
) -> bool:  # fmt: skip
    """Admit a row; False when it is answered by another run of it, now or later."""
    slot_id, epoch, pos = row["slot"], row["epoch"], row["pos"]
    record = session.slots.get((slot_id, epoch))
    if record is None:
        record = session.record(slot_id, epoch)  # says why not
    token, logits = row.get("token"), row.get("logits") is True
    sampling = read_sampling(row) if "sampling" in row else None
    digest = ("step", token, logits, sampling)
    run = record.running
    if run is not None and isinstance(run, StepRun) and run.pos == pos and run.digest == digest:
        run.waiters.append((ticket, index, True))
        return False
    try:
        if run is not None:
            check_idle(record)
        if not may_launch:
            work.check_launch(deadline_s)
        request = work.engine.admit_step(slot_id, epoch, pos, token, sampling, logits)
    except RequestRejected:
        stored = record.find(pos, digest)
        if stored is None:
            raise
        ticket.put(index, stored.results, stored.logits, True)
        return False
    run = StepRun(record, pos, digest, [(ticket, index, False)])
    record.running = work.runs[request] = run
    return True
