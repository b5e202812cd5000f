"""The core that both clients share: numbering of requests, matching of replies, deadlines.

No sockets, no clock of its own and no threads: it turns calls into frames and frames into replies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client import packed, protocol
from latentd_client._request import Call, Pending, Reply
from latentd_client.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd_client.results import DaemonInfo


class Exchange:
    """Requests in flight on one connection."""

    def __init__(self) -> None:
        self.max_frame_bytes = protocol.MAX_FRAME_BYTES
        self.max_frames = protocol.MAX_FRAMES
        self.skipped = 0
        self._last_id = 0
        self._pending: dict[int, Pending] = {}
        self._late: dict[int, Call] = {}

    def heed(self, info: DaemonInfo) -> None:
        """Keep to the limits that a daemon has told."""
        self.max_frame_bytes, self.max_frames = info.max_frame_bytes, info.max_frames

    def start(self, call: Call) -> tuple[Pending, list[bytes | memoryview]]:
        """Number a call. Raises ProtocolError, before anything is sent, when it breaks a limit
        (the daemon would drop the connection without a word)."""
        self._last_id = request_id = self._next_id()
        frames = _frames(call, request_id)
        if len(frames) > 1 or len(frames[0]) > min(protocol.MAX_HEADER_BYTES, self.max_frame_bytes):
            self._check_limits(call, frames)
        pending = Pending(request_id, call)
        if call.is_kept:
            pending.exchange = self
        call.pending = pending
        if call.expect:
            self._pending[request_id] = pending
        return pending, frames

    def _check_limits(self, call: Call, frames: Sequence[bytes | memoryview]) -> None:
        if len(frames) > self.max_frames:
            raise ProtocolError(
                f"{call.op}: {len(frames)} frames, the daemon takes {self.max_frames}"
            )
        if len(frames[0]) > protocol.MAX_HEADER_BYTES:
            raise ProtocolError(
                f"{call.op}: a header of {len(frames[0])} bytes, at most "
                f"{protocol.MAX_HEADER_BYTES}; pass token ids as a numpy int32 array"
            )
        for frame in frames:
            if len(frame) > self.max_frame_bytes:
                raise ProtocolError(
                    f"{call.op}: a frame of {len(frame)} bytes, "
                    f"the daemon takes {self.max_frame_bytes}"
                )

    def _next_id(self) -> int:
        """A number that no request in flight has."""
        request_id = self._last_id % packed.MAX_ID + 1
        while request_id in self._pending or request_id in self._late:
            request_id = request_id % packed.MAX_ID + 1
        return request_id

    def receive(self, frames: list[bytes]) -> None:
        """Give a message to the request it answers. Replies to abandoned requests are skipped
        (`on_late` is told), and so is what cannot be read."""
        try:
            reply = _read(frames)
        except ProtocolError:
            self.skipped += 1
            return
        header = reply.header
        request_id, status = header.get("id"), header.get("status")
        pending = self._pending.get(request_id) if type(request_id) is int else None
        if pending is None or type(status) is not str:
            self.skipped += 1
            late = self._late.get(request_id) if type(request_id) is int else None
            if late is not None and not header.get("more"):
                del self._late[header["id"]]
                if late.on_late is not None and status == "ok":
                    late.on_late(header)
            return
        if not header.get("more"):
            del self._pending[pending.request_id]
        pending.replies.append(reply)
        if pending.wake is not None:
            pending.wake()

    def awaits(self, pending: Pending) -> bool:
        """Whether the last reply to a request has not come and was not given up."""
        return self._pending.get(pending.request_id) is pending

    def abandon(self, pending: Pending) -> None:
        """Stop waiting for a request; its replies will be skipped, but `on_late` is told of one,
        also of one that has come and was not taken."""
        is_open, on_late = self._pending.pop(pending.request_id, None), pending.call.on_late
        if on_late is None:
            return
        if is_open is None:
            for reply in pending.replies:
                if reply.header["status"] == "ok":
                    on_late(reply.header)
        else:
            self._late[pending.request_id] = pending.call
            while len(self._late) > 1024:  # replies that never came
                del self._late[next(iter(self._late))]

    def abandon_all(self, but: int | None = None) -> None:
        """Stop waiting for everything (the connection is lost), but for what was sent when it had
        been lost `but` times already: that went out on a later one."""
        for pending in [each for each in self._pending.values() if each.connection != but]:
            del self._pending[pending.request_id]
            if pending.wake is not None:
                pending.wake()


def _frames(call: Call, request_id: int) -> list[bytes | memoryview]:
    if call.packed is not None:
        return [packed.number(call.packed, request_id)]
    header = {"v": protocol.VERSION, "id": request_id, "op": call.op, **call.fields}
    return protocol.encode(header, call.raw)


def _read(frames: list[bytes]) -> Reply:
    if len(frames) == 1 and (found := packed.read_results(frames[0])) is not None:
        request_id, results = found
        return Reply._make(({"id": request_id, "status": "ok"}, [], results))
    header = protocol.decode_header(frames[0])
    return Reply(header, protocol.decode_raw(header, frames[1:]))
