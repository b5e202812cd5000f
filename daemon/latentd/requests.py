"""Requests of the data socket: read, check, and hand to the operation's handler.

Every request gets a reply: from here, or through a run's ticket once the engine has completed it
(`completions`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from latentd import (
    requests_admit,
    requests_adopt,
    requests_attend,
    requests_export,
    requests_fork,
    requests_session,
    requests_step,
    requests_stream,
    requests_verify,
)
from latentd.operations import DeviceFault
from latentd_client import field_checks, fields, packed, protocol
from latentd_client.errors import ProtocolError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

    Handler: TypeAlias = Callable[[Work, bytes, int, Header, list[Tensor]], Header | None]

log = logging.getLogger(__name__)

HANDLERS: Final[dict[str, Handler]] = {
    "hello": requests_session.hello,
    "open": requests_admit.open_slot,
    "step": requests_step.step,
    "stream": requests_stream.stream,
    "credit": requests_stream.credit,
    "truncate": requests_session.truncate,
    "fork": requests_fork.fork,
    "verify": requests_verify.verify,
    "attend": requests_attend.attend,
    "export": requests_export.export,
    "adopt": requests_adopt.adopt,
    "close": requests_session.close,
    "cancel": requests_session.cancel,
    "resume": requests_session.resume,
    "ping": requests_session.ping,
}
"""A handler gets (work, peer, request id, header, raw frames) and returns the results, or None
when the reply comes later; it raises RequestRejected and has changed nothing then."""


def handle(work: Work, peer: bytes, frames: list[bytes], num_frames: int) -> None:
    """Take one message; `num_frames` counts also the frames beyond the limit, which are not kept.
    Raises DeviceFault only."""
    request_id: int | None = None
    try:
        if num_frames == 1 and (steps := packed.read_steps(frames[0])) is not None:
            request_id = steps.request_id
            requests_step.run_packed(work, peer, steps)
            return
        header = _read_header(frames)
        request_id = read_id(header)
        if num_frames > work.options.max_frames:
            text = f"{num_frames} frames, at most {work.options.max_frames}"
            raise RequestRejected("too_large", text)
        results = _dispatch(work, peer, request_id, header, frames[1:])
        if results is not None:
            header = {"v": protocol.VERSION, "id": request_id, "status": "ok", **results}
            work.outbox.send(peer, header)
    except RequestRejected as refusal:
        work.outbox.refuse(peer, request_id, refusal)
    except ProtocolError as error:
        work.outbox.counters["malformed"] += 1
        work.outbox.refuse(peer, request_id, RequestRejected("invalid", str(error)))
    except DeviceFault:
        raise
    except Exception:
        log.exception("a request failed inside the daemon")
        text = "the daemon failed on this request; its log says how"
        work.outbox.refuse(peer, request_id, RequestRejected("internal", text))


def _read_header(frames: list[bytes]) -> Header:
    if not frames:
        raise ProtocolError("a message without a header")
    if len(frames[0]) > protocol.MAX_HEADER_BYTES:
        raise RequestRejected(
            "too_large",
            f"a header of {len(frames[0])} bytes, at most {protocol.MAX_HEADER_BYTES}: "
            "send tensors as raw frames",
        )
    return protocol.decode_header(frames[0])


def read_id(header: Header) -> int:
    """The client's number of a request. Raises ProtocolError when it cannot be given back."""
    request_id = header.get("id")
    if type(request_id) is not int or request_id < 0:
        raise ProtocolError("field id is missing or not an int of 0 or more")
    return request_id


def _dispatch(
    work: Work, peer: bytes, request_id: int, header: Header, frames: list[bytes]
) -> Header | None:
    work.check_fault()
    op = header.get("op")
    handler = HANDLERS.get(op) if type(op) is str else None
    if handler is None:
        raise refuse_op(header, "the data socket")
    assert type(op) is str
    if op != "hello" and not is_version(header):
        raise refuse_version(header)
    has_rows = op == "step" and header.get("rows") is not None
    table = fields.STEP_ROWS if has_rows else fields.OPS[op]
    field_checks.check(table, header, op)
    return handler(work, peer, request_id, header, protocol.decode_raw(header, frames))


def refuse_op(header: Header, where: str) -> RequestRejected:
    """The refusal of an operation that is not served."""
    op = header.get("op")
    if type(op) is not str:
        return RequestRejected("invalid", "field op is missing or not text")
    later = ": it is reserved for a later version" if op in fields.RESERVED_OPS else ""
    return RequestRejected("unsupported", f"op {op[:40]!r} is not served on {where}{later}")


def is_version(header: Header) -> bool:
    """Whether a header names this protocol version."""
    version = header.get("v")
    return type(version) is int and version == protocol.VERSION


def refuse_version(header: Header) -> RequestRejected:
    """The refusal of another protocol version."""
    return RequestRejected(
        "version",
        f"version {header.get('v')!r:.20}: this daemon speaks {protocol.VERSION}",
        versions=[protocol.VERSION, protocol.VERSION],
    )
