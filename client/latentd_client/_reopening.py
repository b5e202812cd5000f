"""Opening slots again in a new session, from what the client knows of them; for both clients.

The bits of a token depend on the tokens before it, the sampling parameters, the seed and the
position, and on nothing that a daemon keeps: so a slot whose daemon has lost it goes on with the
same bits wherever its tokens are prefilled again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from latentd_client._asked import asked
from latentd_client._opening import Opening
from latentd_client._request import Call
from latentd_client._settling import settle
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot


def ready(calls: Calls, slot: BaseSlot) -> Script[None]:
    """Before a call on a slot: open it again if its session is over, and end what is left of a
    stream that the caller has left."""
    if slot._opened_in is not calls.session:
        yield from reopen(calls, slot)
        slot.drop_reader()
    else:
        yield from settle(calls, slot)


def reopen(calls: Calls, slot: BaseSlot) -> Script[None]:
    """Open a slot again, where it was as far as its caller knows. Raises RequestRejected."""
    known = slot._known
    if slot.is_closed:
        raise RequestRejected("epoch_gone", f"slot {slot.slot_id} is closed")
    if known is None:
        text = f"slot {slot.slot_id} was lost with latents of attend: open it and attend again"
        raise RequestRejected("epoch_gone", text)
    sampling = replace(known.sampling, seed=slot.seed)
    opening = Opening(np.array(known.text, np.int32), asked(sampling), salt=known.salt)
    token, length = slot.token, len(known.text)
    session = calls.session
    header, _, _ = yield from opening.ask(calls)
    if token is None and length:  # a step that names none must be refused, as it was before
        seat = {"slot": header["slot"], "epoch": header["epoch"]}
        yield Call("truncate", {"session": session, **seat, "pos": length, "to": length})
    slot.sit(session, header)
    slot._is_forgotten = token is not None  # the daemon has drawn one of its own
