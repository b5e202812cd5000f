"""Records of a session: its slots, its opens by key, and the replies that are kept for repetitions.

The engine thread owns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable

    from latentd.replies import Tensors
    from latentd.runs import OpenRun, Run, SeatRun
    from latentd_client.protocol import Header

MAX_STORED = 8
"""Stored replies of a slot; one operation at a time needs the last one only."""
MAX_STORED_BYTES = 4 << 20
"""Logits and the like kept in a slot's stored replies (the newest reply is always kept)."""


class Reply(Protocol):
    """The reply to a request that changed a slot, kept for its repetition. `results` always has
    context_len; for a stream also its `run`, which holds the tokens."""

    @property
    def digest(self) -> Hashable:
        """The same for the same request."""

    @property
    def results(self) -> Header:
        """The fields of the reply."""

    @property
    def tensors(self) -> Tensors | None:
        """The tensors beside them."""


class Stored(NamedTuple):
    """A `Reply` of plain data."""

    digest: Hashable
    results: Header
    tensors: Tensors | None = None


@dataclass(eq=False, slots=True)
class SlotRecord:
    """A session's slot. `key` is that of the open, fork or adoption that made it; `running` is the
    one operation in flight; `closed_at` is set by close."""

    slot_id: int
    epoch: int
    key: str = ""
    running: Run | None = None
    replies: dict[int, Reply] = field(default_factory=dict)  # by the position they were sent for
    closed_at: float | None = None

    def store(self, pos: int, stored: Reply) -> None:
        """Keep a reply; the oldest ones give way."""
        replies, tensors = self.replies, stored.tensors
        replies.pop(pos, None)
        replies[pos] = stored
        keep = MAX_STORED
        if tensors:
            size = sum(tensor.nbytes for tensor in tensors.values())
            keep = max(1, min(keep, MAX_STORED_BYTES // max(1, size)))
        while len(replies) > keep:
            del replies[next(iter(replies))]

    def find(self, pos: int, digest: Hashable) -> Reply | None:
        """The stored reply to the same request, if it is kept."""
        stored = self.replies.get(pos)
        return stored if stored is not None and stored.digest == digest else None

    def newest(self) -> list[Reply]:
        """The stored replies, the last one first."""
        return list(self.replies.values())[::-1]

    def forget_beyond(self, length: int) -> None:
        """Drop the replies that tell of tokens which a truncate has taken back."""
        self.replies = {
            pos: stored
            for pos, stored in self.replies.items()
            if stored.results["context_len"] <= length
        }


@dataclass(eq=False, slots=True)
class OpenRecord:
    """An open, fork or adoption under its key: on its way, or done with a stored reply."""

    digest: Hashable
    run: OpenRun | SeatRun | None
    stored: Stored | None = None

    @property
    def seat(self) -> tuple[int, int] | None:
        """The slot and epoch that it opened."""
        results = self.stored.results if self.stored is not None else None
        return (results["slot"], results["epoch"]) if results is not None else None
