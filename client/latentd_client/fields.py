"""The operations of protocol version 1 and their fields: types, ranges, what is reserved.
field_checks.py holds headers against them.

The daemon checks every request against these tables; docs/protocol.md is tested against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass

MAX_INT: Final = (1 << 63) - 1
MAX_LOGPROBS: Final = 20
"""Most likeliest tokens that are told beside a token."""
MAX_SEQUENCE: Final = 64
"""Most tokens of a stop sequence."""


@dataclass(frozen=True)
class Field:
    """One field: its type and bounds (of the value, or of the length of text and lists).

    `kind`: int, float, bool, str, ints (list of ints), seats (list of [slot, epoch, pos]), id lists
    (list of lists of 1 to 64 ints), map or list (their own `inner` table), tensor (a map that names
    a raw frame, or a row of one), or prompt (list of ints or a tensor).
    """

    name: str
    kind: str
    low: float = 0
    high: float = MAX_INT
    required: bool = True
    inner: tuple[Field, ...] = ()


SAMPLING: Final = (
    Field("temperature", "float", 0, 1e30, required=False),
    Field("top_k", "int", 0, (1 << 31) - 1, required=False),
    Field("top_p", "float", 0, 1, required=False),
    Field("min_p", "float", 0, 1, required=False),
    Field("seed", "int", 0, (1 << 64) - 1, required=False),
)
_SESSION: Final = Field("session", "str", 1, 64)
_SEAT: Final = (Field("slot", "int", 0, (1 << 31) - 1), Field("epoch", "int"))
_POS: Final = Field("pos", "int")
_SAMPLING: Final = Field("sampling", "map", required=False, inner=SAMPLING)
_DEADLINE: Final = Field("deadline_s", "float", 0, 1e9, required=False)
_LOGPROBS: Final = Field("logprobs", "int", 0, MAX_LOGPROBS, required=False)
_BIAS: Final = (Field("ids", "tensor"), Field("values", "tensor"))
_LIMITS: Final = (
    Field("bias", "map", required=False, inner=_BIAS),
    Field("mask", "tensor", required=False),
)
_ROW: Final = (
    *_SEAT,
    _POS,
    Field("token", "int", 0, (1 << 31) - 1, required=False),
    _SAMPLING,
    Field("logits", "bool", required=False),
    _LOGPROBS,
    *_LIMITS,
)
GEOMETRY: Final = (
    Field("layers", "int", 1),
    Field("page_size", "int", 1),
    Field("row_dim", "int", 1),
    Field("dtype", "str", 1, 16),
)
_BEGIN: Final = (
    Field("geometry", "map", inner=GEOMETRY),
    Field("fingerprint", "str", 1, 128),
    Field("tokens", "prompt", 0, 1 << 20),
    Field("token", "int", 0, (1 << 31) - 1, required=False),
    _SAMPLING,
    Field("salt", "str", 0, 64, required=False),
)
_PUT: Final = (Field("first", "int"), Field("pages", "tensor"), Field("checksums", "tensor"))
_SESSION_OPTIONAL: Final = Field("session", "str", 1, 64, required=False)
_ID: Final = (1 << 64) - 1
HELLO: Final = (
    Field("versions", "ints", 2, 2),
    Field("client", "str", 0, 200, required=False),
)
STEP_ROWS: Final = (_SESSION, Field("rows", "list", 1, 128, inner=_ROW), _DEADLINE)
"""Fields of a step with `rows`; without that field it is one row (`OPS["step"]`)."""

OPS: Final[dict[str, tuple[Field, ...]]] = {
    "hello": HELLO,
    "open": (
        _SESSION,
        Field("key", "str", 1, 64),
        Field("prompt", "prompt", 0, 1 << 20),
        _SAMPLING,
        Field("logits", "bool", required=False),
        _LOGPROBS,
        *_LIMITS,
        Field("prompt_logprobs", "int", 0, MAX_LOGPROBS, required=False),
        Field("salt", "str", 0, 64, required=False),
        _DEADLINE,
    ),
    "step": (_SESSION, *_ROW, _DEADLINE),
    "stream": (
        _SESSION,
        *_SEAT,
        _POS,
        Field("max_steps", "int", 1),
        Field("token", "int", 0, (1 << 31) - 1, required=False),
        Field("stop", "ints", 0, 4096, required=False),
        Field("stop_sequences", "id lists", 0, 64, required=False),
        Field("credit", "int", 1),
        _SAMPLING,
        _LOGPROBS,
        *_LIMITS,
        _DEADLINE,
    ),
    "verify": (
        _SESSION,
        *_SEAT,
        _POS,
        Field("token", "int", 0, (1 << 31) - 1, required=False),
        Field("draft", "ints", 0, 127),
        Field("stop", "ints", 0, 4096, required=False),
        _SAMPLING,
        _LOGPROBS,
        *_LIMITS,
        _DEADLINE,
    ),
    "attend": (
        _SESSION,
        Field("layer", "int", 0, (1 << 31) - 1),
        Field("rows", "seats", 1, 128),
        Field("q", "tensor"),
        Field("latent", "tensor"),
        _DEADLINE,
    ),
    "credit": (_SESSION, Field("stream", "int", 0, _ID), Field("n", "int", 1)),
    "truncate": (_SESSION, *_SEAT, _POS, Field("to", "int")),
    "fork": (_SESSION, Field("key", "str", 1, 64), *_SEAT, _POS, _SAMPLING, _DEADLINE),
    "export": (
        _SESSION,
        *_SEAT,
        _POS,
        Field("first", "int"),
        Field("count", "int"),
        Field("tokens", "bool", required=False),
    ),
    "adopt": (
        _SESSION,
        Field("key", "str", 1, 64),
        Field("begin", "map", required=False, inner=_BEGIN),
        Field("put", "map", required=False, inner=_PUT),
        Field("commit", "bool", required=False),
        Field("drop", "bool", required=False),
        _DEADLINE,
    ),
    "close": (
        _SESSION,
        Field("slot", "int", 0, (1 << 31) - 1, required=False),
        Field("epoch", "int", required=False),
    ),
    "cancel": (_SESSION, Field("request", "int", 0, _ID)),
    "resume": (
        _SESSION,
        Field("slot", "int", 0, (1 << 31) - 1, required=False),
        Field("epoch", "int", required=False),
        Field("pos", "int", required=False),
        Field("credit", "int", 1, required=False),
    ),
    "ping": (_SESSION_OPTIONAL,),
}
"""Operations of the data socket."""

MAX_TRACED: Final = 1024
"""Launches that a daemon remembers for `trace`."""

CONTROL_OPS: Final[dict[str, tuple[Field, ...]]] = {
    "health": (),
    "stats": (Field("sessions", "bool", required=False),),
    "trace": (Field("last", "int", 1, MAX_TRACED, required=False),),
    "resume": (_SESSION,),
    "cancel": (_SESSION, Field("request", "int", 0, _ID)),
    "drain": (
        Field("drain_s", "float", 0, 86400, required=False),
        Field("save", "str", 1, 2048, required=False),
    ),
    "ping": (_SESSION_OPTIONAL,),
}
"""Operations of the control socket."""

FEATURES: Final = (
    "fork", "prefix_cache", "stop_sequences", "stream_token", "resume_stream", "logprobs",
    "prompt_logprobs", "bias", "mask", "verify", "export", "adopt", "save", "attend",
)  # fmt: skip
"""What a daemon of this version serves beyond what the first one did; hello tells it."""
ATTEND_FEATURES: Final = ("fork", "attend")
"""The same of a daemon that serves attention only."""
RESERVED_OPS: Final = frozenset({"reload"})
"""Named by the design for later versions of the daemon; refused as `unsupported`."""
