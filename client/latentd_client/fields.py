"""The operations of protocol version 1 and their fields: types, ranges, what is reserved.

The daemon checks every request against these tables; docs/protocol.md is tested against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from latentd_client.protocol import Header

MAX_INT: Final = (1 << 63) - 1
MAX_LOGPROBS: Final = 20
"""Most likeliest tokens that are told beside a token."""
MAX_SEQUENCE: Final = 64
"""Most tokens of a stop sequence."""


@dataclass(frozen=True)
class Field:
    """One field: its type and bounds (of the value, or of the length of text and lists).

    `kind`: int, float, bool, str, ints (list of ints), id lists (list of lists of 1 to 64 ints),
    map or list (their own `inner` table), tensor (a map that names a raw frame, or a row of one),
    or prompt (list of ints or a tensor).
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
    "credit": (_SESSION, Field("stream", "int", 0, _ID), Field("n", "int", 1)),
    "truncate": (_SESSION, *_SEAT, _POS, Field("to", "int")),
    "fork": (_SESSION, Field("key", "str", 1, 64), *_SEAT, _POS, _SAMPLING),
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

CONTROL_OPS: Final[dict[str, tuple[Field, ...]]] = {
    "health": (),
    "stats": (),
    "resume": (_SESSION,),
    "cancel": (_SESSION, Field("request", "int", 0, _ID)),
    "drain": (Field("drain_s", "float", 0, 86400, required=False),),
    "ping": (_SESSION_OPTIONAL,),
}
"""Operations of the control socket."""

FEATURES: Final = (
    "fork", "prefix_cache", "stop_sequences", "stream_token", "resume_stream", "logprobs",
    "prompt_logprobs", "bias", "mask", "verify",
)  # fmt: skip
"""What a daemon of this version serves beyond what the first one did; hello tells it."""
RESERVED_OPS: Final = frozenset({"export", "adopt", "attend", "reload"})
"""Named by the design for later versions of the daemon; refused as `unsupported`."""


def check(table: tuple[Field, ...], header: Header, where: str) -> None:
    """Raise RequestRejected("invalid") naming the first field that is missing, of a wrong type or
    out of range. Unknown fields are ignored."""
    for field in table:
        value = header.get(field.name)
        if value is None:
            if field.required:
                raise _invalid(where, field, "is missing")
        elif field.kind == "int":
            if type(value) is not int:
                raise _invalid(where, field, f"is a {type(value).__name__}, must be an int")
            if not field.low <= value <= field.high:
                raise _invalid(where, field, _outside(field, value))
        else:
            _check_other(field, value, where)


def _check_other(field: Field, value: object, where: str) -> None:
    kind = field.kind
    if kind == "bool":
        if type(value) is not bool:
            raise _invalid(where, field, f"is a {type(value).__name__}, must be a bool")
    elif kind == "float":
        if type(value) is not float and type(value) is not int:
            raise _invalid(where, field, f"is a {type(value).__name__}, must be a number")
        if not field.low <= value <= field.high:  # false for NaN too
            raise _invalid(where, field, _outside(field, value))
    elif kind == "str":
        if type(value) is not str:
            raise _invalid(where, field, f"is a {type(value).__name__}, must be text")
        _check_length(field, value, where)
    elif kind == "map":
        if type(value) is not dict:
            raise _invalid(where, field, f"is a {type(value).__name__}, must be a map")
        check(field.inner, value, f"{where}: {field.name}")
    elif kind == "tensor" or (kind == "prompt" and type(value) is dict):
        if type(value) is not dict or type(value.get("raw")) is not int:
            ids = "a list of ints or " if kind == "prompt" else ""
            raise _invalid(where, field, f'must be {ids}{{"raw": index}}')
    else:
        _check_list(field, value, where)


def _check_list(field: Field, value: object, where: str) -> None:
    if type(value) is not list:
        raise _invalid(where, field, f"is a {type(value).__name__}, must be a list")
    _check_length(field, value, where)
    if field.kind == "list":
        for index, item in enumerate(value):
            if type(item) is not dict:
                raise _invalid(where, field, f"[{index}] is not a map")
            check(field.inner, item, f"{where}: {field.name}[{index}]")
    elif field.kind == "id lists":
        for index, item in enumerate(value):
            if type(item) is not list or not 1 <= len(item) <= MAX_SEQUENCE:
                raise _invalid(where, field, f"[{index}] is no list of 1 to {MAX_SEQUENCE} ints")
            _check_ids(field, item, where)
    else:
        _check_ids(field, value, where)


def _check_ids(field: Field, value: list[object], where: str) -> None:
    if not all(type(item) is int and 0 <= item <= 0x7FFFFFFF for item in value):
        raise _invalid(where, field, "must hold ints of 0 to 2^31 - 1 only")


def _check_length(field: Field, value: str | list[object], where: str) -> None:
    if not field.low <= len(value) <= field.high:
        raise _invalid(
            where, field, f"has length {len(value)}, must be {field.low} to {field.high}"
        )


def _outside(field: Field, value: float) -> str:
    if field.high >= MAX_INT and value < field.low:  # no bound but that of the wire, or another's
        return f"is {value}, must be {field.low} or more"
    return f"is {value}, must be {field.low} to {field.high}"


def _invalid(where: str, field: Field, what: str) -> RequestRejected:
    return RequestRejected("invalid", f"{where}: field {field.name} {what}")
