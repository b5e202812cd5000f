"""The serving loop: one thread owns the data socket and the engine.

A turn: 1. take all ready messages, admit each alone; 2. one engine run for all of them, after a
short wait for slots that step in turn with them (`gather`), and the launch of what comes behind it;
3. send what completed; 4. look after leases, deadlines, parked replies, the watchdog; 5. with
nothing to do, poll for `spin_us` after the last message, then block.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from latentd import housekeeping
from latentd.access import Access
from latentd.completions import complete
from latentd.control import ControlThread
from latentd.figures import Figures, take_down
from latentd.gather import Gather
from latentd.intake import FEW_MESSAGES, Intake
from latentd.listener import Listener
from latentd.operations import DeviceFault
from latentd.reload import Reload
from latentd.replies import Outbox
from latentd.sessions import Sessions
from latentd.upkeep import Upkeep
from latentd.work import Work
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from latentd.engine_protocol import EngineProtocol
    from latentd.options import ServerOptions

LAST_WORDS_S = 0.5
"""Longest time from the last replies until the connections break, while somebody is connected: when
libzmq sees the break, a client's socket (ZMQ_IMMEDIATE) drops what it has received and not yet been
asked for. Before it a failure is told for as long to whoever comes: nobody could know of it."""
BEHIND_FAULT_S = 0.05
"""The same when that was told."""
FLUSH_MS = 300
"""Longest wait for the last replies to leave."""


class Server:
    """Serves one engine. `bind`, then `serve` on the thread that owns the engine."""

    def __init__(
        self, engine: EngineProtocol, options: ServerOptions,
        on_tick: Callable[[], None] | None = None,
        handed_over: Mapping[str, socket.socket] | None = None,
    ) -> None:  # fmt: skip
        """`on_tick` is called on the engine thread a few times a second (the watchdog);
        `handed_over` has sockets that listen already, by endpoint. Raises AccessError."""
        self._engine = engine
        self._options = options
        self._handed_over = handed_over
        self.drain_s = options.drain_s
        """Time for running work when the control socket is asked to drain without naming one."""
        self.sessions = Sessions(options.lease_s, options.grace_s)
        self.access = Access(options.access)
        self.reload = Reload()
        """The last one; whoever reloads sets it, for `stats`."""
        self.save_to: Path | None = None
        """Where whoever asked for the drain wants to have the slots saved."""
        self._on_tick = on_tick
        self._posts: deque[Callable[[], None]] = deque()
        self._stop_at: float | None = None
        self._gather = Gather(options.spin_us > 0)
        self._listener: Listener | None = None
        self._control: ControlThread | None = None

    @property
    def endpoint(self) -> str:
        """Where clients connect, once bound."""
        assert self._listener is not None
        return self._listener.endpoint

    @property
    def control_endpoint(self) -> str:
        """Where the control socket is, once bound."""
        assert self._listener is not None
        return self._listener.control_endpoint

    def bind(self) -> None:
        """Bind both sockets and start the control thread. Raises EndpointError."""
        options = self._options
        listener = self._listener = Listener(options, self.access, self._handed_over)
        sessions = self.sessions
        self._outbox = Outbox(listener.router)
        self._work = Work(
            self._engine, options, sessions, self._outbox, self.access, self.control_endpoint
        )
        self._intake = Intake(self._work, listener)
        figures = Figures(lambda: self._post(publish), take_down(self._work, self.reload))

        def publish() -> None:
            figures.publish(take_down(self._work, self.reload))

        self._control = ControlThread(
            listener.control_router, sessions, self.access, figures, self._post_cancel, self._drain
        )
        self._control.start()

    def stop(self, drain_s: float) -> None:
        """Refuse new work from now on and leave `serve` when the running work is done, after
        `drain_s` at the latest. Safe on any thread and in a signal handler."""
        stop_at = time.monotonic() + drain_s
        self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
        if self._listener is not None:
            self._listener.wake()

    def abort(self) -> None:
        """Leave `serve` at once; who still waits is told `draining`."""
        self.stop(0.0)

    def serve(self) -> None:
        """Serve until stopped. Raises DeviceFault after every waiting client was told."""
        listener, engine, work = self._listener, self._engine, self._work
        assert listener is not None
        upkeep = Upkeep(work, listener.router, self._posts, self._on_tick)
        if listener.pulse is not None:
            engine.on_long_wait(listener.pulse.beat)
        try:
            while True:
                now = work.now = time.monotonic()
                self._intake.take()
                if now >= work.next_deadline:
                    housekeeping.drop_late(work)
                if engine.has_work:
                    if self._gather.waits(engine, now):
                        listener.poll(self._gather.until)
                        continue
                    self._run(engine)
                upkeep.turn(now)
                if self._stop_at is not None and self._is_done(self._stop_at):
                    return
                if work.waiting.count:
                    work.let_in()
                if not engine.has_work and not self._posts:
                    listener.wait(upkeep.next_turn())
        except DeviceFault as fault:
            text = f"the device failed, the daemon ends and will be restarted: {fault}"
            self._tell_failure("device_fault", "device_fault", text)
            raise
        except Exception:
            text = "the daemon has failed, ends and will be restarted; its log says why"
            self._tell_failure("internal", "draining", text)
            raise
        finally:
            self._outbox.flush()
            self._close(listener)

    def _run(self, engine: EngineProtocol) -> None:
        """One launch, and its replies."""
        work, gather = self._work, self._gather
        started = time.monotonic()
        engine.launch()
        gather.launched(work)
        events = engine.finish()
        self._intake.launched(started, time.monotonic())
        if not gather.has_steps and engine.has_work:  # who has come by now is in the next launch
            work.now = time.monotonic()
            self._intake.take(FEW_MESSAGES)
            engine.launch()
        complete(work, events)
        gather.answered(started, time.monotonic())

    def _is_done(self, stop_at: float) -> bool:
        """While stopping: whether nothing runs any more or the time is over."""
        work = self._work
        if not work.is_draining:
            work.is_draining = True
            self._gather.is_on = False
            housekeeping.end_lost(work)
            self._set_state("draining")
        if not work.runs and not work.undelivered and not self._outbox.has_parked:
            return True
        if time.monotonic() < stop_at:
            return False
        housekeeping.end_runs(work)
        return True

    def _tell_failure(self, code: str, later: str, text: str) -> None:
        """Answer everybody who waits with `code`, and with `later` who asks in the time that there
        is for it: whose request has not run may well make it elsewhere."""
        self._set_state("fault")
        self._work.fault = later, text
        housekeeping.refuse_all(self._work, RequestRejected(code, text))
        self._intake.say_last_words(LAST_WORDS_S, to_newcomers=True)

    def _set_state(self, state: str) -> None:
        """What health tells from now on."""
        if self._control is not None:
            self._control.state = state

    def _post_cancel(self, token: str, request_id: int) -> None:
        def cancel() -> None:
            with contextlib.suppress(RequestRejected):
                session = self._work.sessions.renew(token, self._work.now)
                self._work.cancel(session, request_id)

        self._post(cancel)

    def _drain(self, drain_s: float | None, save_to: Path | None) -> None:
        if save_to is not None:
            self.save_to = save_to
        self.stop(self.drain_s if drain_s is None else drain_s)

    def _post(self, action: Callable[[], None]) -> None:
        """Have the engine thread do something in its next turn."""
        self._posts.append(action)
        if self._listener is not None:
            self._listener.wake()

    def _close(self, listener: Listener) -> None:
        """Let the last replies leave, then take everything down."""
        listener.release()
        self._engine.on_long_wait(lambda: None)
        seconds = LAST_WORDS_S if self._work.fault is None else BEHIND_FAULT_S
        self._intake.say_last_words(seconds, to_newcomers=False)
        if self._control is not None:
            self._control.stop()
        listener.close(FLUSH_MS)
