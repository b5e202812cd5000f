"""The export request: pages of an idle slot as raw frames."""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from latentd.replies import Ticket
from latentd.requests_admit import RETRY_AFTER_S, check_idle
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor


def export(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Send a range of pages, and what an adoption must know of the slot."""
    session = work.renew(header["session"], peer)
    record = session.record(header["slot"], header["epoch"])
    first, count = header["first"], header["count"]
    transfers, info = work.engine.transfers, work.engine.info
    size, most = count * transfers.geometry.page_bytes, work.options.max_frame_bytes
    if size > most:
        text = f"export: {count} pages are {size} bytes, a frame has at most {most}"
        raise RequestRejected("too_large", text)
    if work.outbox.is_parked(peer):
        text = "export: replies before it have not been read yet: read them first"
        raise RequestRejected("busy", text, retry_after_s=RETRY_AFTER_S)
    check_idle(record)
    slot = transfers.look(record.slot_id, record.epoch, header["pos"])
    pages = transfers.read(slot, first, count)
    work.took_piece = count > 0
    assert slot.sampling is not None
    tensors: dict[str, Tensor] = {"pages": pages, "checksums": page_checksums(pages)}
    if header.get("tokens"):
        tensors["tokens"] = np.array(slot.tokens[: slot.length], np.int32)
    results: Header = {
        "status": "ok",
        "context_len": slot.length,
        "token": slot.token,
        "sampling": asdict(slot.sampling),
        "geometry": asdict(transfers.geometry),
        "fingerprint": info.fingerprint,
    }
    Ticket(work.outbox, peer, request_id).put(0, results, tensors)
    return None


def page_checksums(pages: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The CRC-32 of each page."""
    return np.array([zlib.crc32(page) for page in pages], np.uint32)
