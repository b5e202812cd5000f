"""The adopt request: begin, put page by page, commit; then it is a slot like any other.

Before the commit there is no slot that anybody could name. A put or commit that is refused for what
it holds ends the adoption, so that nothing of it is kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from latentd.operations import SamplingParams
from latentd.records import OpenRecord, Stored
from latentd.replies import Ticket
from latentd.requests_admit import join, read_ids, read_sampling
from latentd.requests_export import page_checksums
from latentd.runs import SeatRun
from latentd.runs_waiting import seat_or_wait
from latentd_client import protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.engine_transfer import Arrival
    from latentd.session import Session
    from latentd.work import Work
    from latentd_client.protocol import Header, Tensor

STAGES = ("begin", "put", "commit", "drop")


@dataclass(eq=False, slots=True)
class Adoption:
    """One on its way, under its key; `checksums` are those of the pages that are there."""

    arrival: Arrival
    num_pages: int
    expires_at: float
    checksums: dict[int, int] = field(default_factory=dict)


def adopt(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """One stage of an adoption."""
    session, key = work.renew(header["session"], peer), header["key"]
    stages = [name for name in STAGES if header.get(name) not in (None, False)]
    if len(stages) != 1:
        text = f"adopt: one of the fields {', '.join(STAGES)} says what to do, {len(stages)} do"
        raise RequestRejected("invalid", text)
    if stages[0] == "drop":
        record = session.opens.get(key)
        known = key in session.adoptions or (record is not None and record.run is not None)
        work.drop_adoption(session, key)
        return {"known": known}
    if stages[0] == "begin":
        run = SeatRun(
            session, request_id, key, [(Ticket(work.outbox, peer, request_id), 0, False)],
            work.expires_at(header.get("deadline_s")),
        )  # fmt: skip
        return _begin(work, run, header, raw)
    adoption = session.adoptions.get(key)
    if adoption is None:
        return _find_done(session, key)
    work.check_launch(None)
    try:
        if stages[0] == "commit":
            return _commit(work, session, key, adoption)
        return _put(work, adoption, header["put"], raw)
    except RequestRejected:
        work.drop_adoption(session, key)
        raise


def _begin(work: Work, run: SeatRun, header: Header, raw: Sequence[Tensor]) -> Header | None:
    """Take a seat and the pages, or find the adoption of the same key."""
    session, key, begin = run.session, run.key, header["begin"]
    transfers, info = work.engine.transfers, work.engine.info
    for name, ours in asdict(transfers.geometry).items():
        if begin["geometry"][name] != ours:
            text = f"geometry: {name} is {begin['geometry'][name]}, this daemon has {ours}"
            raise RequestRejected("invalid", f"adopt: {text}")
    if begin["fingerprint"] != info.fingerprint:
        text = "adopt: fingerprint: the pages are of another model, numerics, device or version"
        raise RequestRejected("invalid", f"{text} than this daemon's: they would have other bits")
    tokens = np.array(read_ids("adopt: field tokens", begin["tokens"], raw), np.int32)
    sampling, token, salt = read_sampling(begin), begin.get("token"), begin.get("salt") or ""
    digest = ("adopt", hashlib.blake2b(tokens.tobytes()).digest(), token, sampling, salt)
    results: Header = {
        "pages": -(-len(tokens) // transfers.geometry.page_size),
        "page_bytes": transfers.geometry.page_bytes,
        "limit_s": work.options.lease_s,
    }
    known = session.opened(key, digest)
    if known is not None and known.run is not None:
        join(known.run, (run.waiters[0][0], 0, True), run.expires_at)
        return None
    if known is not None:
        return {**results, "replayed": True}
    work.check_launch(header.get("deadline_s"))
    session.check_seat(work.options.session_slots)
    wanted = (tokens, token, sampling or SamplingParams())
    if work.waiting.has_new:
        transfers.check(*wanted)

    def start() -> Header:
        arrival = transfers.begin(*wanted, salt)
        expires_at = work.now + work.options.lease_s
        session.adoptions[key] = Adoption(arrival, len(arrival.missing), expires_at)
        session.opens[key] = OpenRecord(digest, None)
        return results

    return seat_or_wait(work, run, digest, start, tokens.nbytes)


def _put(work: Work, adoption: Adoption, put: Header, raw: Sequence[Tensor]) -> Header:
    """Take a range of pages; one that is there already may come again."""
    work.took_piece = True
    first, pages, sums = _read_pages(work, adoption, put, raw)
    there = adoption.checksums
    for page, checksum in enumerate(sums, first):
        if there.get(page, checksum) != checksum:
            raise RequestRejected("invalid", f"adopt: page {page} was put with other bytes before")
    is_new = any(page not in there for page in range(first, first + len(sums)))
    if is_new:
        work.engine.transfers.put(adoption.arrival, first, pages)
        there.update(enumerate(sums, first))
    adoption.expires_at = work.now + work.options.lease_s
    results: Header = {"missing": adoption.num_pages - len(there)}
    return results if is_new else {**results, "replayed": True}


def _read_pages(
    work: Work, adoption: Adoption, put: Header, raw: Sequence[Tensor]
) -> tuple[int, NDArray[np.uint8], list[int]]:
    """The pages of a put and their checksums, which are right."""
    first, size = put["first"], work.engine.transfers.geometry.page_bytes
    pages = protocol.pick_raw(put["pages"], raw)
    if pages is None or pages.dtype != np.uint8 or pages.ndim != 2 or pages.shape[1] != size:
        text = f"adopt: put: field pages must name a raw uint8 frame [n, {size}]"
        raise RequestRejected("invalid", text)
    told = protocol.pick_raw(put["checksums"], raw)
    if told is None or told.dtype != np.uint32 or told.shape != pages.shape[:1]:
        text = f"adopt: put: field checksums must name a raw uint32 frame [{len(pages)}]"
        raise RequestRejected("invalid", text)
    if not len(pages) or first + len(pages) > adoption.num_pages:
        text = f"adopt: put: {len(pages)} pages from {first} on, of {adoption.num_pages} in all"
        raise RequestRejected("invalid", text)
    wrong = np.flatnonzero(page_checksums(pages) != told)  # type: ignore[arg-type]
    if len(wrong):
        text = f"adopt: page {first + int(wrong[0])} has another checksum than the put names"
        raise RequestRejected("invalid", text)
    return first, pages, told.tolist()  # type: ignore[return-value]


def _commit(work: Work, session: Session, key: str, adoption: Adoption) -> Header:
    """Make a slot of it."""
    arrival, missing = adoption.arrival, adoption.arrival.missing
    if missing:
        text = f"adopt: commit: {len(missing)} of {adoption.num_pages} pages are missing"
        raise RequestRejected("invalid", f"{text}, the first is page {min(missing)}")
    slot = work.engine.transfers.commit(arrival)
    state = work.engine.slot(slot.slot_id, slot.epoch)
    results: Header = {
        "slot": state.slot_id,
        "epoch": state.epoch,
        "context_len": state.context_len,
        "token": state.token,
        "seed": state.seed,
    }
    del session.adoptions[key]
    session.add_slot(state.slot_id, state.epoch, key)
    digest = session.opens[key].digest
    session.opens[key] = OpenRecord(digest, None, Stored(digest, results))
    return results


def _find_done(session: Session, key: str) -> Header:
    """The stored reply of a commit: the same again, or a put that came late, changes nothing."""
    record = session.opens.get(key)
    digest = None if record is None else record.digest
    if record is None or record.stored is None or not _is_adoption(digest):
        text = f"adopt: no adoption of key {key!r} is on its way (any more): begin again"
        raise RequestRejected("epoch_gone", text)
    return {**record.stored.results, "replayed": True}


def _is_adoption(digest: object) -> bool:
    return isinstance(digest, tuple) and digest[0] == "adopt"
