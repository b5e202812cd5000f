"""The attend request: attention of one layer, for rows of a client that runs the rest itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from latentd.replies import Ticket
from latentd.requests_admit import check_idle, join
from latentd.runs import AttendRun
from latentd_client import protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.attending import AttendRequest, Bits
    from latentd.records import SlotRecord
    from latentd.session import Session
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def attend(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Queue the rows, all or none; the same request in flight is waited for."""
    session = work.renew(header["session"], peer)
    rows = [(slot, epoch, pos) for slot, epoch, pos in header["rows"]]
    q, latent = (_read(name, header, raw) for name in ("q", "latent"))
    layer, size = header["layer"], _reply_bytes(work, len(rows))
    if size > work.options.max_frame_bytes:
        text = f"attend: the result of {len(rows)} rows has {size} bytes, a frame has at most "
        raise RequestRejected("too_large", text + str(work.options.max_frame_bytes))
    records = _records(session, rows)
    ticket, run = Ticket(work.outbox, peer, request_id), records[0].running
    expires_at = work.expires_at(header.get("deadline_s"))
    if isinstance(run, AttendRun) and _is_same(run.request, layer, rows, q, latent):
        join(run, (ticket, 0, True), expires_at)
        return None
    for record in records:
        check_idle(record)
    work.check_launch(header.get("deadline_s"))
    request = work.engine.admit_attend(layer, rows, q, latent)
    run = AttendRun(records, request, [(ticket, 0, False)], expires_at)
    work.runs[request] = run
    for record in records:
        record.running = run
    return None


def _records(session: Session, rows: Sequence[tuple[int, int, int]]) -> list[SlotRecord]:
    """The slots of all rows, each once."""
    found: dict[SlotRecord, None] = {}
    for index, (slot_id, epoch, _) in enumerate(rows):
        try:
            found[session.record(slot_id, epoch)] = None
        except RequestRejected as refusal:
            raise RequestRejected(refusal.code, f"row {index}: {refusal}", row=index) from None
    return list(found)


def _read(name: str, header: Header, raw: list[Tensor]) -> Bits:
    tensor = protocol.pick_raw(header[name], raw)
    if tensor is None:
        raise RequestRejected("invalid", f"attend: field {name} must name a raw frame")
    return cast("Bits", tensor)  # the engine looks at its dtype and shape


def _reply_bytes(work: Work, rows: int) -> int:
    info = work.engine.info
    return rows * info.heads * info.v_dim * (2 if info.dtype == "bfloat16" else 4)


def _is_same(
    request: AttendRequest, layer: int, rows: Sequence[tuple[int, int, int]], q: Bits, latent: Bits
) -> bool:
    """Whether a request in flight asks the very same, bit for bit."""
    return (
        (request.layer, request.rows) == (layer, tuple(rows))
        and all(
            a.dtype == b.dtype and a.shape == b.shape
            and np.array_equal(a.view(np.uint8), b.view(np.uint8))
            for a, b in ((request.latent, latent), (request.q, q))
        )
    )  # fmt: skip
