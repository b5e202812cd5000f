"""The call of attend, for both clients; a script like those of `_calls`.

bf16 comes as a torch tensor, as a numpy array of ml_dtypes.bfloat16, or as its bits in uint16, and
goes back the same way. What lies in host memory is sent from there, without a copy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd_client._asked import read_tensor
from latentd_client._given import whole
from latentd_client._reopening import ready
from latentd_client._request import Call
from latentd_client.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd_client._calls import Calls, Script
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor

_SENT = (np.dtype(np.uint16), np.dtype(np.float32))


def attend(
    calls: Calls, layer: int, pairs: Sequence[tuple[BaseSlot, int | None]], q: Any, latent: Any,
    timeout_s: float | None,
) -> Script[Any]:  # fmt: skip
    """Attention of one layer; takes over the slots' lengths."""
    for slot, _ in pairs:
        if slot._reader is not None or slot._opened_in is not calls.session:
            yield from ready(calls, slot)
    seats = [[slot.slot_id, slot.epoch, whole(pos, "rows: a position")] for slot, pos in pairs]
    fields: Header = {
        "session": calls.session,
        "layer": whole(layer, "layer"),
        "rows": seats,
        "q": {"raw": 0},
        "latent": {"raw": 1},
        "deadline_s": calls.limit(timeout_s),
    }
    call = Call("attend", fields, [_bits(q, "q"), _bits(latent, "latent")], timeout_s)
    reply = yield from calls.ask(call)
    o, lengths = read_tensor("o", reply.header, reply.raw), reply.header.get("context_len")
    if o is None or not isinstance(lengths, list) or len(lengths) != len(pairs):
        raise ProtocolError("the daemon's reply to attend lacks o or context_len")
    for (slot, _), length in zip(pairs, lengths, strict=True):
        if slot.context_len != length:
            slot.attended(length)
    return _like(q, o)


def _is_torch(values: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(values, torch.Tensor)


def _bits(values: Any, what: str) -> Tensor:
    """The numbers as they travel. Raises ProtocolError."""
    if _is_torch(values):
        torch, values = sys.modules["torch"], values.detach().cpu()
        is_half = values.dtype == torch.bfloat16
        values = (values.contiguous().view(torch.int16) if is_half else values).numpy()
        return _bits(values.view(np.uint16) if is_half else values, what)
    if isinstance(values, np.ndarray):
        if values.dtype in _SENT:
            return values
        if values.dtype.name == "bfloat16":  # asked last, for it takes numpy a while to make it
            return np.ascontiguousarray(values).view(np.uint16)
    text = "a torch tensor of bfloat16 or a numpy array of bfloat16, or its bits as uint16"
    raise ProtocolError(f"{what} is {type(values).__name__}, must be {text}")


def _like(q: Any, o: Tensor) -> Any:
    """The results as q was given; on the same device. A numpy array is read-only."""
    if _is_torch(q):
        torch, values = sys.modules["torch"], o.copy()
        if o.dtype == np.uint16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).to(q.device)
        return torch.from_numpy(values).to(q.device)
    return o.view(q.dtype)
