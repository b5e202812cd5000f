"""The control socket: its own thread answers health, stats, cancel and drain, whatever the engine
does. It touches nothing of the engine; what must happen there is posted to the engine thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.replies import Outbox
from latentd.requests import is_version, read_id, refuse_op, refuse_version
from latentd.session_list import told_to
from latentd.snapshot_files import SnapshotError, check_target
from latentd_client import field_checks, fields, protocol
from latentd_client.errors import ProtocolError, RequestRejected
from latentd_client.fields import MAX_TRACED

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.access import Access
    from latentd.credentials import Credentials
    from latentd.figures import Figures
    from latentd.routing import Router
    from latentd.sessions import Sessions
    from latentd_client.protocol import Header

MAX_REQUEST_BYTES = 1 << 12
"""Of a control request: its largest field is a session's token."""
BURST_S, REST_S = 0.0002, 0.01
"""How long the thread works without a pause, and then rests: it shares the interpreter with the
engine, which a flood of requests would slow down."""
TICK_S = 1.0
"""Between two looks at connections that do not go on."""

log = logging.getLogger(__name__)


class ControlThread:
    """Answers on the control socket. `state` is set by the server; `figures` come from the engine
    thread, `post_cancel` and `drain` act there."""

    def __init__(
        self, router: Router, sessions: Sessions, access: Access, figures: Figures,
        post_cancel: Callable[[str, int], None], drain: Callable[[float | None, Path | None], None],
    ) -> None:  # fmt: skip
        self.state = "ready"
        self._router = router
        self._sessions = sessions
        self._access = access
        self._outbox = Outbox(router)
        self._figures = figures
        self._post_cancel = post_cancel
        self._drain = drain
        self._started = time.monotonic()
        self._is_stopping = False
        self._waker, self._wakee = socket.socketpair()
        router.watch(self._wakee)
        self._thread = threading.Thread(target=self._run, name="latentd-control", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the socket is the caller's again."""
        if self._thread.is_alive():
            self._is_stopping = True
            self._waker.send(b"x")
            self._thread.join()
        self._waker.close()
        self._wakee.close()

    def _run(self) -> None:
        router, tick_at, rested_at = self._router, 0.0, 0.0
        while not self._is_stopping:
            if (message := router.receive()) is not None:
                try:
                    self._answer(*message)
                except Exception:  # the thread must live on
                    log.exception("a control request failed")
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                self._outbox.flush()
                router.tick(now, frozenset)
            if message is None:
                router.sleep(int((tick_at - now) * 1000) + 1)
                if time.monotonic() - now > REST_S:
                    rested_at = time.monotonic()
            if now - rested_at > BURST_S:
                time.sleep(REST_S)
                rested_at = time.monotonic()

    def _answer(self, peer: bytes, frames: list[bytes], num_frames: int) -> None:
        request_id = None
        try:
            header = protocol.decode_header(frames[0])
            request_id = read_id(header)
            op = header.get("op")
            if type(op) is not str or op not in fields.CONTROL_OPS:
                raise refuse_op(header, "the control socket")
            if not is_version(header):
                raise refuse_version(header)
            field_checks.check(fields.CONTROL_OPS[op], header, op)
            results = self._serve(op, header, peer)
            reply = {"v": protocol.VERSION, "id": request_id, "status": "ok", **results}
            self._outbox.send(peer, reply)
        except RequestRejected as refusal:
            self._outbox.refuse(peer, request_id, refusal)
        except ProtocolError as error:
            self._outbox.refuse(peer, request_id, RequestRejected("invalid", str(error)))

    def _serve(self, op: str, header: Header, peer: bytes) -> Header:
        sessions, who = self._sessions, self._router.who(peer)
        self._access.check(who)
        if op == "health":
            uptime_s = time.monotonic() - self._started
            return {"state": self.state, "boot_id": sessions.boot_id, "pid": os.getpid(),
                    "uptime_s": uptime_s, "sessions": len(sessions)}  # fmt: skip
        if op == "stats":
            told: Header = {}
            if header.get("sessions"):
                told["sessions"] = told_to(who, sessions, self._access)
            return {"stats": self._figures.stats(), **told}
        if op == "trace":
            return self._figures.trace(header.get("last", MAX_TRACED))
        if op == "drain":
            self._access.check_admin(who, op)
            self._drain(header.get("drain_s"), self._read_target(header.get("save"), who))
            return {}
        if header.get("session") is None:
            return {}
        session = sessions.renew(header["session"], time.monotonic())
        session.check_owner(who)
        if op == "cancel":
            known = header["request"] in session.running
            self._post_cancel(session.token, header["request"])
            return {"known": known}
        return {"boot_id": sessions.boot_id, "lease_s": sessions.lease_s}

    def _read_target(self, save: str | None, who: Credentials) -> Path | None:
        """Where a drain is to save. Raises "denied" where not for this peer, "invalid" where that
        cannot be."""
        if save is None:
            return None
        try:
            self._access.check_target(who, target := Path(save))
            check_target(target)
        except (SnapshotError, ValueError, OSError) as error:
            raise RequestRejected("invalid", f"drain: field save: {error}") from None
        return target
