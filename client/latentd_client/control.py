"""The control socket from the outside: health, figures, drain, and renewing a lease."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from latentd_client import protocol
from latentd_client._given import data_endpoint, seconds, text_endpoint
from latentd_client._link import Link
from latentd_client._request import Call
from latentd_client.keys import keys_for

if TYPE_CHECKING:
    from types import TracebackType

    from latentd_client.keys import CurveKeys
    from latentd_client.protocol import Header


class Control:
    """A connection to a daemon's control socket, which answers while the engine is busy.

    `endpoint` is that of the control socket, or without it the one beside the data socket of
    LATENTD_ENDPOINT or the default. Threads may share it; their calls take turns.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 5.0, keys: CurveKeys | None = None
    ) -> None:
        """`keys` are for tcp, as in Client. Raises ConnectionLost when nothing listens there,
        RequestRejected("denied"), KeyFault."""
        if endpoint is None:
            endpoint = protocol.control_endpoint(data_endpoint(None))
        endpoint = text_endpoint(endpoint)
        self.is_remote = endpoint.startswith("tcp://")
        """Whether the daemon may be on another machine."""
        self.timeout_s = seconds(timeout_s)
        self._lock = threading.Lock()
        keys = keys_for(endpoint, keys)
        self._link = Link(endpoint, timeout_s=self.timeout_s, keys=keys)
        if (meeting := self._link.wire.meeting) is not None:
            meeting.close()  # who asks on a broken connection gets no answer in time

    def health(self) -> Header:
        """`state` ("ready", "draining" or "fault"), `boot_id`, `pid`, `uptime_s`."""
        return self._ask("health", {})

    def stats(self) -> Header:
        """Counters and gauges of server and engine; plain numbers, text and maps of them."""
        reply = self._ask("stats", {})
        stats = reply.get("stats")
        return stats if isinstance(stats, dict) else {}

    def trace(self, last: int | None = None) -> list[list[Any]]:
        """The last launches that have ended (at most 1024), the oldest first: kind ("step", "chunk"
        or "attend"), bucket, rows, whether it was queued behind the one before; in seconds of the
        daemon's clock since when its first row was queued (0: not known), when staging began, when
        it was launched and when its end was seen; start and end in ns by the device's clock."""
        steps = self._ask("trace", {} if last is None else {"last": last}).get("steps")
        return steps if isinstance(steps, list) else []

    def sessions(self) -> list[Header]:
        """The sessions that the daemon has, the newest first, at most 512: `number`, who uses it
        (`user`, `group` and `process` on ipc; `key`, its `name` and `address` with CURVE), `slots`,
        operations `running`, and `silent_s`. Others than admins are told of their own only."""
        told = self._ask("stats", {"sessions": True}).get("sessions")
        return told if isinstance(told, list) else []

    def drain(self, drain_s: float | None = None, save: str | os.PathLike[str] = "") -> None:
        """Ask the daemon to finish its running work and leave, within `drain_s` (its own default
        otherwise). Only root, its own user and admins may: RequestRejected("denied") for others.

        With `save`, an absolute path on the daemon's machine, it writes all slots and sessions
        there before it leaves; a start with `--restore` goes on with them."""
        fields: Header = {} if drain_s is None else {"drain_s": seconds(drain_s, "drain_s")}
        if save:
            fields["save"] = os.fspath(save)
        self._ask("drain", fields)

    def renew(self, session: str) -> None:
        """Renew a session's lease. Raises RequestRejected: lease_lost, epoch_gone."""
        self._ask("resume", {"session": session})

    def cancel(self, session: str, request_id: int) -> bool:
        """Cancel a session's open or stream by the id of its request; whether it was running."""
        reply = self._ask("cancel", {"session": session, "request": request_id})
        return bool(reply.get("known"))

    def _ask(self, op: str, fields: Header) -> Header:
        with self._lock:
            self._link.wire.reconnect(self.timeout_s)
            reply = self._link.perform(Call(op, fields), self.timeout_s)
        assert reply is not None
        return {k: v for k, v in reply.header.items() if k not in ("v", "id", "status")}

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._link.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
