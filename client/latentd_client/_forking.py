"""The call of a fork, for both clients; a script like those of `_calls`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from latentd_client._given import sampling_fields
from latentd_client._opening import ask_for_slot, new_key
from latentd_client._reopening import ready
from latentd_client._request import Call

if TYPE_CHECKING:
    from latentd_client._calls import Calls, Script
    from latentd_client._opening import Make
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header
    from latentd_client.results import Sampling

S = TypeVar("S", bound="BaseSlot")


@dataclass(frozen=True, eq=False)
class Forking:
    """What a fork asks for; repeated, it finds its slot by its `key`. With `own_key` the key is the
    caller's, who may come back for the slot."""

    source: BaseSlot
    sampling: Sampling | None
    own_key: str | None
    timeout_s: float | None
    key: str = field(default_factory=new_key)

    def run(self, calls: Calls, make: Make[S]) -> Script[S]:
        """A new slot with the tokens of another one."""
        source = self.source
        yield from ready(calls, source)
        fields: Header = {"session": calls.session, "key": self.own_key or self.key}
        fields |= {**source.seat, "pos": source.context_len}
        if self.sampling is not None:
            fields["sampling"] = sampling_fields(self.sampling)
        fields["deadline_s"] = calls.limit(self.timeout_s)
        call = Call("fork", fields, (), self.timeout_s)
        reply = yield from ask_for_slot(calls, call, self.own_key)
        known = None if source._known is None else source._known.copy(self.sampling)
        slot = make(reply.header, reply.raw, (), known)
        if source._is_forgotten:  # the daemon has not got the token that the source will append
            slot.token, slot._is_forgotten = source.token, True
        return slot
