"""The reply to a step, packed in two parts: what is known at once, and what the device computes.

Together they are the same map that `protocol.encode` makes of the whole header.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from latentd_client import protocol

_TAIL: Final = Struct(">7sI9sd")
_TOKEN: Final = b"\xa5token\xce"
"""msgpack: text of 5 bytes, then a uint 32."""
_LOGPROB: Final = b"\xa7logprob\xcb"
"""Text of 7 bytes, then a float 64."""
_SMALL_MAP: Final = 0x80
"""The first byte of a map of up to 15 entries, less their number."""


def pack_head(request_id: int, context_len: int) -> bytes:
    """The reply up to the two fields that `pack_tail` adds."""
    header = {"v": protocol.VERSION, "id": request_id, "status": "ok", "context_len": context_len}
    body = bytes(protocol.encode(header)[0])
    return bytes((_SMALL_MAP + len(header) + 2,)) + body[1:]


def pack_tail(token: int, logprob: float) -> bytes:
    """The sampled token (0 to 2^32 - 1) and its log-probability."""
    return _TAIL.pack(_TOKEN, token, _LOGPROB, logprob)
