"""The call of a fork, for both clients; a script like those of `_calls`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeVar

from latentd_client._exchange import Call
from latentd_client._given import sampling_fields
from latentd_client._streaming import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling

S = TypeVar("S", bound="BaseSlot")


def fork(
    calls: Calls, make: Callable[[Header, Sequence[Tensor]], S], source: BaseSlot,
    sampling: Sampling | None, key: str | None, timeout_s: float | None,
) -> Script[S]:  # fmt: skip
    """A new slot with the tokens of another one. A fork given up is closed when its reply comes,
    unless the caller made the key."""
    yield from settle(calls, source)
    fields: Header = {"session": calls.session, "key": key or secrets.token_hex(8), **source.seat}
    fields["pos"] = source.context_len
    if sampling is not None:
        fields["sampling"] = sampling_fields(sampling)
    call = Call("fork", fields, (), timeout_s)
    if key is None:
        call.on_late = calls.orphans.append
    reply = yield call
    slot = make(reply.header, reply.raw)
    if source._is_forgotten:  # the daemon has not got the token that the source will append
        slot.token, slot._is_forgotten = source.token, True
    return slot
