"""The step request: one row, or several, each admitted or refused alone.

`is_plain` recognises the usual header in one pass; whatever it does not is checked field by field.
"""

from __future__ import annotations

from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from latentd.replies import RowsTicket, Ticket
from latentd.requests_admit import check_idle, read_sampling
from latentd.runs import StepRun
from latentd_client import fields, protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.sessions import Session
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

_Types: TypeAlias = "dict[str, type]"
_NONE: Final[_Types] = {}
_HEAD: Final[_Types] = {"v": int, "id": int, "op": str}
_SESSION: Final[_Types] = {"session": str}
_DEADLINES: Final[tuple[_Types, ...]] = (_NONE, {"deadline_s": float}, {"deadline_s": int})
_ROW: Final[_Types] = {"slot": int, "epoch": int, "pos": int}
_TOKENS: Final[tuple[_Types, ...]] = (_NONE, {"token": int})
_LOGITS: Final[tuple[_Types, ...]] = (_NONE, {"logits": bool})


def _shapes(*parts: tuple[_Types, ...]) -> frozenset[tuple[tuple[str, ...], tuple[type, ...]]]:
    """Names and their types, in the order in which our clients write them: one of each part."""
    maps = ({k: t for part in chosen for k, t in part.items()} for chosen in product(*parts))
    return frozenset((tuple(types), tuple(types.values())) for types in maps)


_ROWS: Final = _shapes((_ROW,), _TOKENS, _LOGITS)
_STEPS: Final = _shapes((_HEAD,), (_ROW,), _TOKENS, _LOGITS, (_SESSION,), _DEADLINES)
_BATCHES: Final = _shapes((_HEAD,), (_SESSION,), ({"rows": list},), _DEADLINES)
_BOUNDS: Final = {
    field.name: range(int(field.low), int(field.high) + 1)
    for field in (*fields.OPS["step"], *fields.STEP_ROWS)
}
"""Of values, and of the lengths of text and lists. (`in` a range is only quick for an int.)"""
_SLOT, _EPOCH, _POS = (_BOUNDS[name] for name in _ROW)
_TOKEN, _MAX_DEADLINE_S = _BOUNDS["token"], _BOUNDS["deadline_s"][-1]
_COLUMNS: Final = [(itemgetter(name), _BOUNDS[name]) for name in _ROW]


def is_plain(header: Header) -> bool:
    """Whether a header with a readable id is a step of the usual fields in the usual order, all of
    the right types and in range, without raw frames: then the general checks would pass too."""
    shape = tuple(header), tuple(map(type, header.values()))
    if shape in _STEPS:
        is_good = (
            header["slot"] in _SLOT
            and header["epoch"] in _EPOCH
            and header["pos"] in _POS
            and header.get("token", 0) in _TOKEN
        )
    else:
        is_good = shape in _BATCHES and _are_plain_rows(header["rows"])
    return (
        is_good
        and header["v"] == protocol.VERSION
        and header["op"] == "step"
        and len(header["session"]) in _BOUNDS["session"]
        and 0 <= header.get("deadline_s", 0) <= _MAX_DEADLINE_S  # false for NaN
    )


def _are_plain_rows(rows: list[Any]) -> bool:
    """The same of rows, by columns: a row costs little."""
    if len(rows) not in _BOUNDS["rows"] or set(map(type, rows)) != {dict}:
        return False
    if not {(tuple(row), tuple(map(type, row.values()))) for row in rows} <= _ROWS:
        return False
    columns = [([*map(get, rows)], bounds) for get, bounds in _COLUMNS]
    columns.append(([row.get("token", 0) for row in rows], _TOKEN))
    return all(min(column) in bounds and max(column) in bounds for column, bounds in columns)


def step(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Queue one row, or several, each admitted or refused alone."""
    session = work.sessions.renew(header["session"], work.now)
    rows, deadline_s = header.get("rows"), header.get("deadline_s")
    may_launch = not work.is_draining and (deadline_s is None or deadline_s > 0)
    if rows is None:
        one = Ticket(work.outbox, peer, request_id)
        _step_row(work, session, header, may_launch, deadline_s, one, 0)
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
) -> None:  # fmt: skip
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
        return
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
        return
    run = StepRun(record, pos, digest, [(ticket, index, False)])
    record.running = work.runs[request] = run
