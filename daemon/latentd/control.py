"""The control socket: its own thread answers health, stats, cancel and drain, whatever the engine
does. It touches nothing of the engine; what must happen there is posted to the engine thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import zmq

from latentd.replies import Outbox
from latentd.requests import is_version, read_id, refuse_op, refuse_version
from latentd.zmq_router import ZmqRouter
from latentd_client import fields, protocol
from latentd_client.errors import ProtocolError, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.sessions import Sessions
    from latentd_client.protocol import Header

STATS_WAIT_S = 0.25
"""How long to wait for fresh figures of a busy engine before the last ones are given."""

log = logging.getLogger(__name__)


class ControlThread:
    """Answers on the control socket. `state` is set by the server; `ask_stats` makes the engine
    thread call `publish` soon, `post_cancel` and `drain` act there too."""

    def __init__(
        self, router: zmq.Socket[bytes], sessions: Sessions, ask_stats: Callable[[], None],
        post_cancel: Callable[[str, int], None], drain: Callable[[float | None], None],
    ) -> None:  # fmt: skip
        self.state = "ready"
        self._router = router
        self._sessions = sessions
        self._outbox = Outbox(ZmqRouter(router, 1))
        self._ask_stats = ask_stats
        self._post_cancel = post_cancel
        self._drain = drain
        self._started = time.monotonic()
        self._stats: Header = {}
        self._stats_at = 0.0
        self._fresh = threading.Event()
        self._waker, self._wakee = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="latentd-control", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def publish(self, stats: Header) -> None:
        """New figures, from the engine thread."""
        self._stats = stats
        self._stats_at = time.monotonic()
        self._fresh.set()

    def stop(self) -> None:
        """End the thread; the socket is the caller's again."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join()
        self._waker.close()
        self._wakee.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakee, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wakee.fileno() in ready:
                return
            frames = self._router.recv_multipart(copy=False)
            try:
                self._answer(frames)
            except Exception:  # the thread must live on
                log.exception("a control request failed")

    def _answer(self, frames: list[zmq.Frame]) -> None:
        peer, request_id = frames[0].bytes, None
        try:
            if len(frames) < 2 or len(frames[1]) > protocol.MAX_HEADER_BYTES:
                raise ProtocolError("a control request is one header")
            header = protocol.decode_header(frames[1].bytes)
            request_id = read_id(header)
            op = header.get("op")
            if type(op) is not str or op not in fields.CONTROL_OPS:
                raise refuse_op(header, "the control socket")
            if not is_version(header):
                raise refuse_version(header)
            fields.check(fields.CONTROL_OPS[op], header, op)
            results = self._serve(op, header, frames[1])
            reply = {"v": protocol.VERSION, "id": request_id, "status": "ok", **results}
            self._outbox.send(peer, reply)
        except RequestRejected as refusal:
            self._outbox.refuse(peer, request_id, refusal)
        except ProtocolError as error:
            self._outbox.refuse(peer, request_id, RequestRejected("invalid", str(error)))

    def _serve(self, op: str, header: Header, frame: zmq.Frame) -> Header:
        sessions = self._sessions
        if op == "health":
            uptime_s = time.monotonic() - self._started
            return {"state": self.state, "boot_id": sessions.boot_id, "pid": os.getpid(),
                    "uptime_s": uptime_s, "sessions": len(sessions)}  # fmt: skip
        if op == "stats":
            return {"stats": self._get_stats()}
        if op == "drain":
            check_owner(_peer_address(frame))
            self._drain(header.get("drain_s"))
            return {}
        if header.get("session") is None:
            return {}
        session = sessions.renew(header["session"], time.monotonic())
        if op == "cancel":
            known = header["request"] in session.running
            self._post_cancel(session.token, header["request"])
            return {"known": known}
        return {"boot_id": sessions.boot_id, "lease_s": sessions.lease_s}

    def _get_stats(self) -> Header:
        """Fresh figures, or the last ones when the engine thread is long in a step."""
        self._fresh.clear()
        self._ask_stats()
        self._fresh.wait(STATS_WAIT_S)
        return {**self._stats, "age_s": time.monotonic() - self._stats_at}


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def check_owner(address: str) -> None:
    """Let only root and the daemon's own user through. `address` is libzmq's Peer-Address:
    localhost:uid:gid:pid on ipc; on tcp it says nothing of a user. Raises "denied"."""
    fields = address.split(":")
    is_ipc = len(fields) == 4 and fields[0] == "localhost" and fields[1].isdigit()
    if not is_ipc or int(fields[1]) not in (0, os.getuid()):
        who = f"user {fields[1]}" if is_ipc else "an unknown user"
        raise RequestRejected("denied", f"drain: {who} is neither root nor the daemon's own")
