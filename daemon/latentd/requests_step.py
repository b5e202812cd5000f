"""The step request: one row, or several, each admitted or refused alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from latentd.extras import NO_EXTRAS
from latentd.replies import RowsTicket, Ticket
from latentd.requests_admit import check_idle, join, read_sampling
from latentd.requests_extras import read_extras
from latentd.runs import StepRun
from latentd.waiting import Place
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.extras import Extras
    from latentd.limits import Limits
    from latentd.operations import SamplingParams
    from latentd.work import Work
    from latentd_client.packed import StepsRequest
    from latentd_client.protocol import Header, Tensor


def step(
    work: Work, peer: bytes, request_id: int, header: Header, raw: list[Tensor]
) -> Header | None:
    """Queue one row, or several."""
    given = header.get("rows")
    rows = [header] if given is None else given
    ticket: Ticket | RowsTicket = Ticket(work.outbox, peer, request_id)
    if given is not None:
        ticket = RowsTicket(work.outbox, peer, request_id, len(rows))
    admission = _Rows(work, header["session"], header.get("deadline_s"), ticket)
    vocab = work.engine.info.vocab_size
    known: dict[str, Limits | None] = {}
    for index, row in enumerate(rows):
        try:
            sampling = read_sampling(row) if "sampling" in row else None
            token, logits = row.get("token"), row.get("logits") is True
            seat = (row["slot"], row["epoch"], row["pos"])
            extras = read_extras(row, raw, vocab, known=known)
            admission.admit(index, *seat, token, sampling, logits, extras)
        except RequestRejected as refusal:
            ticket.refuse(index, refusal)
    return None


def run_packed(work: Work, peer: bytes, steps: StepsRequest) -> None:
    """The same for a request in the fixed layout, which needs no checks of its fields."""
    work.check_fault()
    ticket: Ticket | RowsTicket
    if steps.is_batch:
        ticket = RowsTicket(work.outbox, peer, steps.request_id, len(steps.rows))
    else:
        ticket = Ticket(work.outbox, peer, steps.request_id)
    admit = _Rows(work, steps.session, steps.deadline_s, ticket).admit
    for index, (slot_id, epoch, pos, token) in enumerate(steps.rows):
        try:
            admit(index, slot_id, epoch, pos, token, None, False)
        except RequestRejected as refusal:
            ticket.refuse(index, refusal)


class _Rows:
    """The rows of one request."""

    def __init__(
        self, work: Work, session: str, deadline_s: float | None, ticket: Ticket | RowsTicket
    ) -> None:
        self._work = work
        self._session = work.renew(session, ticket.peer)
        self._deadline_s = deadline_s
        self._expires_at = work.expires_at(deadline_s)
        self._may_launch = not work.is_draining and (deadline_s is None or deadline_s > 0)
        self._ticket = ticket

    def admit(
        self, index: int, slot_id: int, epoch: int, pos: int, token: int | None,
        sampling: SamplingParams | None, logits: bool, extras: Extras = NO_EXTRAS,
    ) -> None:  # fmt: skip
        """Queue a row; or answer it by another run of it, now or later."""
        work, session = self._work, self._session
        record = session.slots.get((slot_id, epoch)) or session.record(slot_id, epoch)
        digest = ("step", token, logits, sampling, extras)
        other = record.running
        if isinstance(other, StepRun) and other.pos == pos and other.digest == digest:
            join(other, (self._ticket, index, True), self._expires_at)
            return
        waiters = [(self._ticket, index, False)]
        run = StepRun(
            slot_id, epoch, pos, logits, extras, record, digest, waiters, self._expires_at
        )
        try:
            if other is not None:
                check_idle(record)
            if not self._may_launch:
                work.check_launch(self._deadline_s)
            work.engine.admit_step(run, token, sampling)
        except RequestRejected as refusal:
            stored = record.find(pos, digest)
            if stored is not None:
                self._ticket.put(index, stored.results, stored.tensors, True)
                return
            start = partial(work.engine.admit_step, run, token, sampling)
            work.waiting.enter(Place(run, start, refusal))
            record.running = run
            return
        record.running = work.runs[run] = run
