"""Requests in bytes whose replies are the same from every daemon: those of the codec and of the
checks of fields, before a session is looked at."""

from __future__ import annotations

from typing import Any, Final

import msgpack

SESSION: Final = "0123456789abcdef" * 3
_PING: Final[dict[Any, Any]] = {"v": 1, "id": 7, "op": "ping"}
_OPEN: Final = {"v": 1, "id": 7, "op": "open", "session": SESSION, "key": "k", "prompt": [1]}
_RAW: Final = {**_OPEN, "prompt": {"raw": 0}}


def _pack(header: object) -> list[bytes]:
    return [msgpack.packb(header)]


def _described(dtype: Any, shape: Any, *frames: bytes) -> list[bytes]:
    return [*_pack({**_RAW, "raw": [{"dtype": dtype, "shape": shape}]}), *frames]


REQUESTS: Final[dict[str, list[bytes]]] = {
    "ping": _pack(_PING),
    "keys in another order": _pack(dict(reversed(_PING.items()))),
    "an unknown field, and one that is nil": _pack({**_PING, "colour": "red", "session": None}),
    "the widest forms of map, text and numbers": [
        bytes.fromhex("df00000003 db00000001 76 d30000000000000001 da0002 6964 cf0000000000000007")
        + bytes.fromhex("d902 6f70 db00000004 70696e67")
    ],
    "the largest id": _pack({**_PING, "id": (1 << 64) - 1}),
    "an empty header": [b""],
    "an empty frame before the header": [b"", *_pack(_PING)],
    "no msgpack": [b"\xc1"],
    "a header that is cut off": [_pack(_PING)[0][:-1]],
    "bytes behind the header's map": [_pack(_PING)[0] + b"\xc0"],
    "a header that is a list": _pack([1, 2]),
    "a key that is no text": _pack({1: 2, **_PING}),
    "an extension type": _pack({**_PING, "x": msgpack.ExtType(1, b"x")}),
    "a timestamp": _pack({**_PING, "x": msgpack.Timestamp(1)}),
    "no id": _pack({"v": 1, "op": "ping"}),
    "a negative id": _pack({**_PING, "id": -1}),
    "an id that is text": _pack({**_PING, "id": "7"}),
    "no operation": _pack({"v": 1, "id": 7}),
    "an unknown operation": _pack({**_PING, "op": "fly"}),
    "a reserved operation": _pack({**_PING, "op": "reload"}),
    "an operation of the control socket": _pack({**_PING, "op": "stats"}),
    "another version": _pack({**_PING, "v": 2}),
    "hello without a common version": _pack({**_PING, "op": "hello", "versions": [2, 3]}),
    "too many frames": [*_pack(_PING), *[b""] * 16],
    "a raw frame that is not described": [*_pack(_PING), b""],
    "a description without its frame": _described("int32", [1]),
    "an unknown dtype": _described("int64", [1], bytes(8)),
    "a raw frame of another size": _described("int32", [2], bytes(4)),
    "a negative size": _described("int32", [-1], b""),
    "too many sizes": _described("int32", [1] * 9, bytes(4)),
    "sizes whose product is too large": _described("uint8", [1 << 30, 1 << 30, 0], b""),
    "a field that is missing": _pack({"v": 1, "id": 7, "op": "open", "session": SESSION}),
    "a bool for an int": _pack({**_OPEN, "logprobs": True}),
    "an int out of range": _pack({**_OPEN, "logprobs": 21}),
    "text that is too long": _pack({**_OPEN, "key": "k" * 65}),
    "a number out of range": _pack({**_OPEN, "sampling": {"temperature": -1.0}}),
    "a token that is no int": _pack({**_OPEN, "prompt": [1.5]}),
}
"""What is sent to the data socket, by what there is to it; frames of one message each."""

CONTROL_REQUESTS: Final[dict[str, list[bytes]]] = {
    "ping at the control socket": _pack(_PING),
    "an operation of the data socket": _pack(_OPEN),
    "hello at the control socket": _pack({**_PING, "op": "hello", "versions": [1, 1]}),
    "health in another version": _pack({**_PING, "op": "health", "v": 2}),
    "health without an id": _pack({"v": 1, "op": "health"}),
    "stats with an int for a bool": _pack({**_PING, "op": "stats", "sessions": 1}),
    "a trace of no launches": _pack({**_PING, "op": "trace", "last": 0}),
    "a trace of more launches than are remembered": _pack({**_PING, "op": "trace", "last": 1025}),
    "a trace of a number that is no int": _pack({**_PING, "op": "trace", "last": 2.0}),
    "a drain within less than no time": _pack({**_PING, "op": "drain", "drain_s": -0.5}),
    "a drain within more than a day": _pack({**_PING, "op": "drain", "drain_s": 86401}),
    "a drain within no number": _pack({**_PING, "op": "drain", "drain_s": float("nan")}),
    "a drain that saves nowhere": _pack({**_PING, "op": "drain", "save": ""}),
    "a drain with a path that is too long": _pack({**_PING, "op": "drain", "save": "/" * 2049}),
}
"""The same of the control socket."""
