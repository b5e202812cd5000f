"""One request and its replies, as both clients keep them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from latentd_client import packed
from latentd_client._given import seconds
from latentd_client.errors import DeadlineExceeded, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd_client._exchange import Exchange
    from latentd_client.protocol import Header, Tensor


class Reply(NamedTuple):
    """One reply: its header and its raw frames, or `results` of steps (see `packed`)."""

    header: Header
    raw: list[Tensor]
    results: list[packed.Result] | None = None


@dataclass(slots=True)
class Call:
    """A request to be made, of `fields` and `raw`, or in the fixed layout (`packed`). `timeout_s`
    None means the client's own; `on_late` gets an ok reply that comes after the caller gave up.
    Without `expect` nobody waits; `is_kept`: a wait that fails does not abandon it (more replies
    will be asked for). `pending` is set when it is sent.
    """

    op: str
    fields: Header
    raw: Sequence[Tensor] = ()
    timeout_s: float | None = None
    on_late: Callable[[Header], None] | None = None
    expect: bool = True
    is_kept: bool = False
    pending: Pending | None = None
    packed: packed.Packed | None = None

    def time(self, left_s: float) -> float:
        """How long to wait for a reply, where so much is left of the caller's time."""
        own_s = left_s if self.timeout_s is None else min(self.timeout_s, left_s)
        return max(0.0, own_s)

    def __post_init__(self) -> None:
        """Check the caller's time limit."""
        if self.timeout_s is not None:
            self.timeout_s = seconds(self.timeout_s)


@dataclass(eq=False, slots=True)
class Pending:
    """A request on its way; `replies` fills up. `wake` is called for each (the async client).
    `exchange` is set for one that is kept."""

    request_id: int
    call: Call
    connection: int = 0  # how often the connection had been lost when it was sent; set by sender
    replies: deque[Reply] = field(default_factory=deque)
    wake: Callable[[], None] | None = None
    exchange: Exchange | None = None

    @property
    def is_open(self) -> bool:
        """Whether more replies may come of one that is kept, on the connection on which it went."""
        return self.exchange is not None and self.exchange.awaits(self)

    def abandon(self) -> None:
        """Stop waiting for one that is kept: its last reply may never come. Again is harmless."""
        if self.exchange is not None:
            self.exchange.abandon(self)

    def take(self) -> Reply:
        """The oldest reply. Raises RequestRejected when it is a refusal."""
        reply = self.replies.popleft()
        header = reply.header
        if header["status"] != "ok":
            raise refusal(header)
        return reply


def refusal(header: Header) -> RequestRejected:
    """The error that a reply with another status than ok stands for."""
    skip = ("v", "id", "status", "error", "more", "raw", "code", "message")
    detail = {name: value for name, value in header.items() if name not in skip}
    text = header.get("error") or header["status"]
    return RequestRejected(str(header["status"]), str(text), **detail)


def too_late(call: Call, timeout_s: float) -> DeadlineExceeded:
    """The error for a call without a reply in time."""
    return DeadlineExceeded(
        f"no reply to {call.op} within {timeout_s:.3g} s; it may have run all the same: "
        "repeat the same call safely, or raise timeout_s"
    )
