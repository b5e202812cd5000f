"""What each call says and how its reply changes a slot, for both clients, without any waiting.

A call is a generator (`Script`): it yields a `Call` to be sent, or a `Pending` whose next reply it
wants, and is given the `Reply`; or seconds to wait. A client only moves the bytes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from latentd_client import protocol
from latentd_client._given import seconds, whole
from latentd_client._reopening import ready
from latentd_client._request import Call, Pending, Reply
from latentd_client._version import __version__
from latentd_client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LatentdError,
    ModelChanged,
    RequestRejected,
    SessionLost,
)
from latentd_client.results import DaemonInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header

T = TypeVar("T")
Script: TypeAlias = Generator["Call | Pending | float", Reply, T]

_NAME = f"latentd-client/{__version__}"

PASSING: Final = frozenset({"draining", "device_fault"})
"""Codes of a daemon that is about to end, and may be started again."""


class Calls:
    """The calls of one client. With `reopens` its slots are opened again in a new session when the
    one before is over; `is_lost` says that it is, and `gone` is what all calls raise without."""

    info: DaemonInfo  # set by hello, as `session` is

    def __init__(self, endpoint: str, timeout_s: float, reopens: bool) -> None:
        self._endpoint = endpoint
        self.timeout_s = seconds(timeout_s)
        self.reopens = reopens
        self.is_lost = False
        self.gone: SessionLost | None = None
        self.session = ""
        self.session_bytes = b""
        self.orphans: list[Header] = []  # slots whose open was given up, to be closed
        self.on_orphan: Callable[[], object] = lambda: None

    def limit(self, timeout_s: float | None) -> float:
        """The time of a call in seconds."""
        return self.timeout_s if timeout_s is None else seconds(timeout_s)

    def hello(self, timeout_s: float) -> Script[DaemonInfo]:
        """Agree on a version and start a session. Raises ModelChanged when there was one before
        and slots of it would not go on with the same bits."""
        versions = [protocol.VERSION, protocol.VERSION]
        reply = yield Call("hello", {"versions": versions, "client": _NAME}, (), timeout_s)
        info, session = DaemonInfo.from_reply(reply.header), str(reply.header.get("session"))
        info = replace(info, control=protocol.as_seen_from(self._endpoint, info.control))
        if self.session and info.fingerprint != self.info.fingerprint:
            yield Call("close", {"session": session}, expect=False)
            raise ModelChanged(
                "the daemon was restarted and its bits are others: "
                f"{_identity(info)} in place of {_identity(self.info)}; make a new client"
            )
        self.info, self.session, self.is_lost = info, session, False
        self.session_bytes = session.encode()
        self.orphans.clear()
        return info

    def translate(self, error: LatentdError) -> LatentdError:
        """The error itself, or SessionLost for a refusal which says that the session is over."""
        if not isinstance(error, RequestRejected):
            return error
        boot_id = error.detail.get("boot_id")
        if boot_id is not None and self.session and boot_id != self.info.boot_id:
            what = "the daemon was restarted and its slots are lost"
        elif error.code == "lease_lost":
            what = "the session has ended, because the daemon did not hear of it for too long, and"
            what += " its slots are lost"
        else:
            return error
        return SessionLost(
            f"{what}: make a new client and open them again; a client made with reopen=True does "
            "that by itself"
        )

    def note(self, error: LatentdError, session: str) -> None:
        """Take note of what a call has met that was made in this session: it may be over."""
        told = self.translate(error)
        if told is not error and isinstance(told, SessionLost) and session is self.session:
            self.is_lost = True
            self.gone = None if self.reopens else told

    def survives(self, error: LatentdError) -> bool:
        """Whether the same call, made again, may go on in another life of the daemon."""
        if isinstance(error, RequestRejected):
            rows = error.detail.get("rows", ())
            if isinstance(rows, list) and not all(isinstance(x, RequestRejected) for x in rows):
                return False  # others of the step's rows have run
        error = self.translate(error)
        is_passing = error.code in PASSING or isinstance(error, (ConnectionLost, DeadlineExceeded))
        return self.reopens and is_passing and not isinstance(error, ModelChanged)

    def orphan(self, header: Header) -> None:
        """Nobody wants the slot of this reply any more."""
        self.orphans.append(header)
        self.on_orphan()

    def close_orphans(self) -> Script[None]:
        """Close the slots of opens that were answered after their caller had given up."""
        while self.orphans:
            header = self.orphans.pop()
            seat = {"slot": header.get("slot"), "epoch": header.get("epoch")}
            yield Call("close", {"session": self.session, **seat}, expect=False)

    def ask(self, call: Call) -> Script[Reply]:
        """The reply to a call that may wait at the daemon; whose caller is cancelled or interrupted
        takes it back, unless it was launched."""
        try:
            return (yield call)
        except LatentdError:
            raise
        except BaseException:
            if call.pending is not None:
                request = {"session": self.session, "request": call.pending.request_id}
                yield Call("cancel", request, expect=False)
            raise

    def truncate(self, slot: BaseSlot, to: int, timeout_s: float | None) -> Script[int]:
        """Drop all tokens from position `to` on."""
        yield from ready(self, slot)
        to = whole(to, "to")
        fields = {"session": self.session, **slot.seat, "pos": slot.context_len, "to": to}
        reply = yield Call("truncate", fields, (), timeout_s)
        slot.cut(int(reply.header["context_len"]))
        return slot.context_len

    def close(self, slot: BaseSlot, timeout_s: float | None) -> Script[None]:
        """Give the slot back; again is harmless."""
        if not slot.is_closed:
            if slot._opened_in is self.session:
                yield Call("close", {"session": self.session, **slot.seat}, (), timeout_s)
            slot.is_closed = True
            slot.drop_reader()

    def end_session(self, timeout_s: float) -> Script[None]:
        """Give all slots and the session back."""
        yield Call("close", {"session": self.session}, (), timeout_s)

    def ping(self, timeout_s: float | None) -> Script[None]:
        """One round trip."""
        yield Call("ping", {"session": self.session}, (), timeout_s)


def _identity(info: DaemonInfo) -> str:
    """What of a daemon its bits depend on, for people."""
    shape = f"{info.numerics}, {info.dtype} on {info.device}, fingerprint {info.fingerprint:.16}"
    return f"{info.model!r} ({shape})"
