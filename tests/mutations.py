"""Messages that are nearly right: requests with fields, frames and bytes changed at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack
import numpy as np

from latentd_client import fields, protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

INTS: Final = (-1, 0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536,
               (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63,
               (1 << 64) - 1, -(1 << 63))  # fmt: skip
JUNK: Final[tuple[Any, ...]] = (
    None, True, False, 0.0, -1.5, float("nan"), float("inf"), "", "x", "\0", "0" * 48, "k" * 65,
    b"", b"\xff", [], [[]], [None], {}, {"raw": 0}, {"raw": 9}, {"raw": -1}, {"raw": 0, "row": 1},
    [0, 0, 0], [1.0], {"temperature": 2.0}, {"seed": 1 << 64}, {"x": {"x": {"x": []}}},
)  # fmt: skip
DTYPES: Final = (*protocol.RAW_DTYPES, "int64", "", None)
OPS: Final = (*fields.OPS, *fields.RESERVED_OPS, "fly", "", None, 5)
NAMES: Final = sorted({field.name for table in fields.OPS.values() for field in table})


def requests(session: str, seat: dict[str, int], number: int) -> list[dict[str, Any]]:
    """A right request of every kind, of a session with a slot; small ones, since some of what is
    made of them is right too and runs."""
    base = {"v": 1, "id": number, "session": session}
    key = f"k{number}"
    tensor = {"raw": 0}
    geometry = {"layers": 1, "page_size": 64, "row_dim": 576, "dtype": "bfloat16"}
    begin = {"geometry": geometry, "fingerprint": "0" * 64, "tokens": [1, 2], "token": 3}
    return [
        {"v": 1, "id": number, "op": "hello", "versions": [1, 1]},
        {**base, "op": "open", "key": key, "prompt": [1, 2, 3], "sampling": {"seed": number}},
        {**base, "op": "open", "key": key, "prompt": tensor, "prompt_logprobs": 2},
        {**base, **seat, "op": "step", "token": 7, "logprobs": 3},
        {**base, **seat, "op": "step", "token": 7, "mask": tensor},
        {**base, **seat, "op": "step", "bias": {"ids": tensor, "values": {"raw": 1}}},
        {**base, "op": "step", "rows": [{**seat, "token": 5}, {**seat, "slot": 1}]},
        {**base, **seat, "op": "stream", "max_steps": 3, "credit": 2, "stop": [1]},
        {**base, "op": "credit", "stream": number - 1, "n": 2},
        {**base, **seat, "op": "verify", "token": 1, "draft": [2, 3]},
        {**base, **seat, "op": "truncate", "to": 2},
        {**base, **seat, "op": "fork", "key": key},
        {**base, **seat, "op": "export", "first": 0, "count": 1, "tokens": True},
        {**base, "op": "adopt", "key": key, "begin": begin},
        {**base, "op": "adopt", "key": key, "put": {"first": 0, "pages": tensor,
                                                    "checksums": {"raw": 1}}},
        {**base, "op": "attend", "layer": 0, "rows": [[*seat.values()]], "q": tensor,
         "latent": {"raw": 1}},
        {**base, "slot": seat["slot"], "epoch": seat["epoch"], "op": "close"},
        {**base, "op": "cancel", "request": number - 1},
        {**base, **seat, "op": "resume", "credit": 4},
        {**base, "op": "ping"},
    ]  # fmt: skip


def mutated(request: dict[str, Any], draw: random.Random) -> list[bytes]:
    """The frames of a request in which at least one thing is wrong or another one."""
    header = dict(request)
    raw = [_array(draw) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
    for _ in range(draw.choice((0, 1, 1, 2))):
        _change_field(header, draw)
    if raw or draw.random() < 0.05:
        header["raw"] = [_description(array, draw) for array in raw]
    try:
        head = msgpack.packb(header)
    except (OverflowError, ValueError):
        head = b"\xc1"
    frames = [head, *(array.tobytes() for array in raw)]
    if draw.random() < 0.5:
        at = draw.randrange(len(frames))
        frames[at] = draw.choice(BYTES)(frames[at], draw)
    if draw.random() < 0.1:
        frames.insert(draw.randrange(len(frames) + 1), draw.randbytes(draw.randrange(9)))
    return frames


def _array(draw: random.Random) -> np.ndarray[Any, Any]:
    dtype = draw.choice(list(protocol.RAW_DTYPES.values()))
    return np.frombuffer(draw.randbytes(dtype.itemsize * draw.randrange(9)), dtype)


def _description(array: np.ndarray[Any, Any], draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return draw.choice(JUNK)
    name = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
    shape: list[Any] = [*array.shape]
    if draw.random() < 0.1:
        name, shape = draw.choice(DTYPES), [draw.choice(INTS), *shape]
    return {"dtype": name, "shape": shape}


def _change_field(header: dict[Any, Any], draw: random.Random) -> None:
    what = draw.randrange(6)
    names: Sequence[Any] = list(header) or NAMES
    if what == 0:
        header.pop(draw.choice(names), None)
    elif what == 1:
        header["op"] = draw.choice(OPS)
    elif what == 2:
        header[draw.choice(NAMES)] = draw.choice(JUNK)
    elif what == 3:
        header[draw.choice(names)] = draw.choice(JUNK)
    else:
        header[draw.choice(names)] = draw.choice(INTS)


def _flip(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return b"\x80"
    at = draw.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << draw.randrange(8),)) + data[at + 1 :]


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randrange(1, 5)) + data[at:]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.randrange(1, 20))
    return data[:end] + data[at:end] * draw.randrange(1, 8) + data[end:]


def _overwrite(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    patch = draw.choice((b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc7\xff\x01",
                         b"\xd6\xff\0\0\0\0", b"\xcf" + b"\xff" * 8, b"\x91" * 40))  # fmt: skip
    return data[:at] + patch + data[at + len(patch) :]


BYTES: Final[tuple[Callable[[bytes, random.Random], bytes], ...]] = (
    _flip, _flip, _cut, _insert, _repeat, _overwrite,
)  # fmt: skip
"""Ways to spoil bytes."""
