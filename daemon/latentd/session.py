"""A session: what one client owns. Slots, opens by key (see `records`), and what runs for it.

The engine thread owns it; another one may move `expires_at`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from latentd.credentials import UNKNOWN
from latentd.records import OpenRecord, SlotRecord
from latentd.runs import OpenRun, SeatRun
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Hashable

    from latentd.credentials import Credentials
    from latentd.requests_adopt import Adoption
    from latentd.runs import Run

MAX_CLOSED = 1024
"""Closed slots of a session whose stored replies are kept."""
MAX_CLOSED_BYTES = 64 << 20
"""Logits, streams and the like kept in them (those of the slot closed last are always kept)."""
CLOSED_SLOT_BYTES = 4096
"""What a closed slot takes beside these: its record and eight replies."""


@dataclass(eq=False, slots=True)
class Session:
    """One client. `expires_at` is moved by every message, and by `renew` from another thread;
    `peer` sent its last message to the engine thread, and `who` is that. `token` is empty in a
    session that was restored and that nobody has gone on with yet. `number` names it to people."""

    token: str = field(repr=False)
    token_hash: bytes
    expires_at: float
    slots: dict[tuple[int, int], SlotRecord] = field(default_factory=dict)
    opens: dict[str, OpenRecord] = field(default_factory=dict)
    adoptions: dict[str, Adoption] = field(default_factory=dict)  # by key, until their commit
    closed: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes, in order of closing
    closed_bytes: int = 0  # of all of them
    running: dict[int, Run] = field(default_factory=dict)  # opens and streams by request id
    is_gone: bool = False
    peer: bytes = b""
    who: Credentials = UNKNOWN
    owner: str | None = None  # Credentials.owner; None where a snapshot does not tell
    number: int = 0

    def check_owner(self, who: Credentials) -> None:
        """Raise RequestRejected("denied") for another user than the session's, who may have seen
        its token."""
        if self.owner is not None and self.owner != who.owner:
            raise RequestRejected("denied", f"the session is another user's, not that of {who}")

    def record(self, slot_id: int, epoch: int) -> SlotRecord:
        """The session's slot. Raises RequestRejected("epoch_gone"), also for others' slots."""
        record = self.slots.get((slot_id, epoch))
        if record is None:
            raise RequestRejected(
                "epoch_gone", f"slot {slot_id} of epoch {epoch} is not open in this session"
            )
        return record

    def check_seat(self, most: int) -> None:
        """Raise RequestRejected("no_slot") when the session has `most` slots, those included that
        its requests wait for; 0: it may have all."""
        coming = sum(isinstance(run, OpenRun | SeatRun) for run in self.running.values())
        count = len(self.slots) - len(self.closed) + len(self.adoptions) + coming
        if most and count >= most:
            raise RequestRejected(
                "no_slot", f"the session has {count} slots, open or on their way, at most {most} "
                "(session_slots): close one", slots_total=most,
            )  # fmt: skip

    def check_id(self, request_id: int, run: Run | None = None) -> None:
        """Raise RequestRejected("invalid") when another open or stream than `run` has that id."""
        if self.running.get(request_id, run) is not run:
            text = f"id {request_id} is that of an open or a stream in flight; take another one"
            raise RequestRejected("invalid", text)

    def add_slot(self, slot_id: int, epoch: int, key: str) -> SlotRecord:
        """Own a new slot."""
        record = self.slots[slot_id, epoch] = SlotRecord(slot_id, epoch, key)
        return record

    def note_closed(self, record: SlotRecord) -> None:
        """A slot was closed: its stored replies are kept; where they are too many, the slots that
        were closed first are forgotten."""
        opened = self.opens.get(record.key)
        kept = [*record.replies.values(), opened.stored if opened is not None else None]
        tensors = [one.tensors.values() for one in kept if one is not None and one.tensors]
        streams = [one.results["run"] for one in kept if one is not None and "run" in one.results]
        size = sum(tensor.nbytes for each in tensors for tensor in each)
        size += sum(stream.num_bytes for stream in streams)
        self.closed[record.slot_id, record.epoch] = size
        self.closed_bytes += size
        while len(self.closed) > 1 and (
            len(self.closed) > MAX_CLOSED or self.closed_bytes > MAX_CLOSED_BYTES
        ):
            self.forget(next(iter(self.closed)))

    @property
    def closed_weight(self) -> int:
        """About what its closed slots take, in bytes."""
        return self.closed_bytes + CLOSED_SLOT_BYTES * len(self.closed)

    def forget(self, seat: tuple[int, int]) -> None:
        """Drop a closed slot and all its stored replies."""
        self.closed_bytes -= self.closed.pop(seat)
        self.opens.pop(self.slots.pop(seat).key, None)

    def opened(self, key: str, digest: Hashable) -> OpenRecord | None:
        """The open, fork or adoption of that key, None before it. Raises RequestRejected("invalid")
        when the key was used for another one."""
        record = self.opens.get(key)
        if record is not None and record.digest != digest:
            raise RequestRejected(
                "invalid",
                f"key {key!r} was used for another open, fork or adoption, or with other fields; "
                "take a new key for a new slot",
            )
        return record
