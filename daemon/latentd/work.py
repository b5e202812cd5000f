"""What the handlers of requests and the completions share: sessions, runs in flight, the outbox."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from latentd.histogram import Histogram
from latentd.routing import Sent
from latentd.runs import AttendRun, OpenRun, SeatRun, StepRun, StreamRun, VerifyRun
from latentd.runs_waiting import let_in, turn_all_away, turn_away
from latentd.waiting import WaitingRoom
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd.access import Access
    from latentd.engine_protocol import EngineProtocol
    from latentd.operations import Reason, Request
    from latentd.options import ServerOptions
    from latentd.records import SlotRecord
    from latentd.replies import Outbox
    from latentd.runs import Run
    from latentd.session import Session
    from latentd.sessions import Sessions


@dataclass(eq=False)
class Work:
    """State of the serving side; the engine thread owns it. `now` is monotonic, set once a turn;
    the deadlines of runs are looked at when `next_deadline` has come, which is before the first of
    them. `fault` is what every request is told once the daemon has failed; `is_draining` is set
    when new work is refused.
    `took_piece`: a request has just moved pages, and the next launch comes before the next request.
    `first_token` has the times from a prompt's request, its wait for room included, to its token.
    `seen_access` is the version of the rules of access that the sessions keep."""

    engine: EngineProtocol
    options: ServerOptions
    sessions: Sessions
    outbox: Outbox
    access: Access
    control: str
    runs: dict[Request, Run] = field(default_factory=dict)
    undelivered: dict[StreamRun, None] = field(default_factory=dict)
    waiting: WaitingRoom = field(init=False)
    first_token: Histogram = field(default_factory=Histogram)
    now: float = 0.0
    next_deadline: float = math.inf
    is_draining: bool = False
    fault: tuple[str, str] | None = None  # code and text
    took_piece: bool = False
    seen_access: int = 0

    def __post_init__(self) -> None:
        self.waiting = WaitingRoom(self.options.max_waiting)

    def renew(self, token: str, peer: bytes) -> Session:
        """The session of a token that came from a peer. Raises like `Sessions.renew` and `move`."""
        session = self.sessions.renew(token, self.now)
        if session.peer != peer:
            self.move(session, peer)
        return session

    def move(self, session: Session, peer: bytes) -> None:
        """A session is used on another connection from now on. Raises RequestRejected("denied")."""
        who = self.outbox.router.who(peer)
        session.check_owner(who)
        session.peer, session.who, session.owner = peer, who, who.owner

    def check_fault(self) -> None:
        """Raise RequestRejected when the daemon has failed."""
        if self.fault is not None:
            raise RequestRejected(*self.fault)

    def expires_at(self, deadline_s: float | None) -> float:
        """When the time of a request is over; the loop will look at it then."""
        if deadline_s is None:
            return math.inf
        expires_at = self.now + deadline_s
        if expires_at < self.next_deadline:
            self.next_deadline = expires_at
        return expires_at

    def check_launch(self, deadline_s: float | None) -> None:
        """Raise RequestRejected when nothing new may start, or not any more."""
        if self.is_draining:
            raise RequestRejected("draining", "the daemon is about to stop; use another one")
        if deadline_s is not None and deadline_s <= 0:
            raise RequestRejected("deadline", "the time was over before the work could start")

    def deliver(self, run: StreamRun) -> None:
        """Send a stream's new tokens. A full peer's stream parks, a dead peer's stops until another
        reader comes."""
        outcome = run.deliver(self.outbox) if not run.is_lost else Sent.DEAD
        if outcome is Sent.FULL:
            self.undelivered[run] = None
            return
        self.undelivered.pop(run, None)
        if run.end is not None:
            self.leave(run.session, run)
        elif outcome is Sent.DEAD:
            self._lose(run)

    def _lose(self, run: StreamRun) -> None:
        """A stream's reader is gone: nothing is produced for nobody."""
        run.is_lost = True
        if self.is_draining:
            self.engine.cancel(run.request, "draining")
        unused = run.ahead
        if unused > 0:
            run.granted -= unused
            self.engine.add_credit(run.request, -unused)

    def leave(self, session: Session, run: OpenRun | SeatRun | StreamRun) -> None:
        """The request of a run is answered: its id means nothing any more."""
        if session.running.get(run.request_id) is run:
            del session.running[run.request_id]

    def cancel(self, session: Session, request_id: int) -> bool:
        """Stop an open or a stream by its request's id, or what is not launched of the rows of
        another one; whether it was running."""
        run = session.running.get(request_id)
        if isinstance(run, OpenRun) or (isinstance(run, StreamRun) and run.end is None):
            self._stop(run, run.request)
        elif isinstance(run, SeatRun):
            self._stop(run, None)
        rows = [
            (request, row)
            for request, row in (*self.runs.items(), *((None, row) for row in self.waiting))
            if isinstance(row, StepRun | VerifyRun | AttendRun)
            and any(ticket.request_id == request_id for ticket, _, _ in row.waiters)
            and row.is_in(session)
        ]
        for request, row in rows:
            self._stop(row, request)
        return run is not None or bool(rows)

    def _stop(self, run: Run, request: Request | None) -> None:
        """Cancel a run, whether it waits or runs."""
        if run in self.waiting:
            turn_away(self, run, RequestRejected("cancelled", "the request was cancelled"))
        elif request is not None:
            self.stop(request, "cancelled")

    def stop(self, request: Request, reason: Reason) -> None:
        """Stop what the engine runs. What is undone is answered at once: a repetition that is there
        already is another one."""
        failed = self.engine.cancel(request, reason)
        if failed is not None and request in self.runs:
            self.fail(self.runs.pop(request), RequestRejected(failed.code, failed.message))

    def let_in(self) -> None:
        """Pages or a slot may have become free: start those who wait for them."""
        let_in(self)

    def close_slot(self, record: SlotRecord) -> None:
        """Free a slot at the engine; its stored replies stay for the grace period."""
        if record.closed_at is not None:
            return
        if record.running is not None and record.running in self.waiting:
            text = f"slot {record.slot_id} was closed"
            turn_away(self, record.running, RequestRejected("epoch_gone", text))
        record.closed_at = self.now
        self.engine.close(record.slot_id, record.epoch)
        self.let_in()

    def end_session(self, session: Session) -> None:
        """Free everything a session owns."""
        self.sessions.remove(session)
        for run in list(session.running.values()):
            if isinstance(run, OpenRun):
                self._stop(run, run.request)
            elif isinstance(run, SeatRun):
                self._stop(run, None)
        for record in session.slots.values():
            self.close_slot(record)
        for key in list(session.adoptions):
            self.drop_adoption(session, key)

    def drop_adoption(self, session: Session, key: str) -> None:
        """Forget an unfinished adoption and free its pages; without one nothing happens."""
        adoption = session.adoptions.pop(key, None)
        record = session.opens.get(key)
        if record is not None and isinstance(record.run, SeatRun):
            self._stop(record.run, None)
        if adoption is not None:
            del session.opens[key]
            self.engine.transfers.drop(adoption.arrival)
            self.let_in()

    def stop_streams(self, session: Session) -> None:
        """End the streams of a session that nobody renews, and what waits."""
        silent = RequestRejected("cancelled", "the session was silent for longer than its lease")
        turn_all_away(self, silent, session)
        for run in list(session.running.values()):
            if isinstance(run, StreamRun) and run.end is None:
                self.engine.cancel(run.request)

    def fail(self, run: Run, refusal: RequestRejected) -> None:
        """Nothing came of a run; a repetition may try again."""
        if isinstance(run, OpenRun | SeatRun):
            self.leave(run.session, run)
            run.session.opens.pop(run.key, None)
            if isinstance(run, SeatRun) and run.source is not None:
                run.source.running = None
        elif isinstance(run, AttendRun):
            for record in run.records:
                record.running = None
        else:
            run.record.running = None
        self.refuse(run, refusal)

    def refuse(self, run: Run, refusal: RequestRejected) -> None:
        """Answer everybody who waits for a run."""
        if isinstance(run, StreamRun):
            self.undelivered.pop(run, None)
            self.leave(run.session, run)
            self.outbox.refuse(run.peer, run.request_id, refusal)
            return
        for ticket, index, _ in run.waiters:
            ticket.refuse(index, refusal)
