"""Steps and their replies in one fixed layout, made and read several times faster.

The maps of docs/protocol.md may hold their keys in any order and their numbers in any width. Here
the order is one and the widths are fixed, so that a struct packs keys and values at once. Whoever
reads looks for the layout by its bytes; all else goes through `protocol`, and means the same.
"""

from __future__ import annotations

import functools
import struct
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from latentd_client import protocol
from latentd_client._layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

Row: TypeAlias = tuple[int, int, int, int]
"""Of a request: slot, epoch, pos, token."""
Result: TypeAlias = tuple[int, int, float]
"""Of a reply: context_len, token, logprob."""
Packed: TypeAlias = tuple[int, bytes]
"""A request without its number: what stands before and what behind it."""

NotPacked: Final = struct.error
"""Raised for a number that does not fit the layout: `protocol.encode` takes it, or says why not."""
SESSION_BYTES: Final = 48
"""Of a session's token, as the daemon makes them."""
MAX_ID: Final = (1 << 32) - 1
"""Of a request; a client counts round and round."""
_MAX_DEADLINE_S: Final = 1e9
_MAX_ROWS: Final = 128

# msgpack: 0x80 + n a map, 0xa0 + n a text, 0xd9 a text and its length, 0xdc a list and its length
# in 2 bytes, 0xce and 0xcf unsigned ints of 4 and 8 bytes, 0xcb a float of 8 bytes
_ID: Final = b"\xa1v" + bytes((protocol.VERSION,)) + b"\xa2id\xce"
_OP: Final = b"\xa2op\xa4step\xa7session\xd9" + bytes((SESSION_BYTES,))
_DEADLINE: Final = b"\xaadeadline_s\xcb"
_ROWS: Final = b"\xa4rows\xdc"
_SLOT, _EPOCH, _POS, _TOKEN = b"\xa4slot\xce", b"\xa5epoch\xcf", b"\xa3pos\xce", b"\xa5token\xce"
_OK: Final = b"\xa6status\xa2ok"
_LENGTH, _LOGPROB = b"\xabcontext_len\xce", b"\xa7logprob\xcb"
_STEP_MAP, _STEPS_MAP, _ROW_MAP = 0x89, 0x86, b"\x84"
_RESULT_MAP, _RESULTS_MAP, _OK_MAP = 0x86, 0x84, b"\x84"

_NUMBER: Final = Struct(">B7sI")
_HEAD: Final = Struct(">18s48s12sd")
_SEAT: Final = Struct(">6sI7sQ")
_PLACE: Final = Struct(">25s5sI7sI")
_STEP: Final = Struct(">18s48s12sd25s5sI7sI")
_COUNT: Final = Struct(">6sH")
_RESULT: Final = Struct(">B7sI10s13sI7sI9sd")
_RESULTS_HEAD: Final = Struct(">B7sI10s6sH")
_RESULT_ROW: Final = Struct(">24sI7sI9sd")
_ROWS_AT: Final = _NUMBER.size + _HEAD.size + _COUNT.size
_ROW_BYTES: Final = len(_ROW_MAP) + _PLACE.size
_ROW_LENGTH: Final = _OK_MAP + _OK + _LENGTH

_HEAD_PARTS: Final = (_ID, "I", _OP, f"{SESSION_BYTES}s", _DEADLINE, "d")
_ROW_PARTS: Final = (_SLOT, "i", _EPOCH, "q", _POS, "I", _TOKEN, "i")
_RESULT_PARTS: Final = (_LENGTH, "I", _TOKEN, "I", _LOGPROB, "d")
_STEP_LAYOUT: Final = Layout(bytes((_STEP_MAP,)), *_HEAD_PARTS, *_ROW_PARTS)
_RESULT_LAYOUT: Final = Layout(bytes((_RESULT_MAP,)), _ID, "I", _OK, *_RESULT_PARTS)


@functools.cache
def _steps_layout(count: int) -> Layout:
    rows = _ROWS + count.to_bytes(2, "big")
    return Layout(bytes((_STEPS_MAP,)), *_HEAD_PARTS, rows, *(_ROW_MAP, *_ROW_PARTS) * count)


@functools.cache
def _results_layout(count: int) -> Layout:
    head = (bytes((_RESULTS_MAP,)), _ID, "I", _OK, _ROWS + count.to_bytes(2, "big"))
    return Layout(*head, *(_OK_MAP + _OK, *_RESULT_PARTS) * count)


class StepsRequest(NamedTuple):
    """A step of one row or, with `is_batch`, of several."""

    request_id: int
    session: str
    deadline_s: float
    is_batch: bool
    rows: list[Row]


def pack_seat(slot: int, epoch: int) -> bytes:
    """What names a slot in all its steps."""
    return _SEAT.pack(_SLOT, slot, _EPOCH, epoch)


def pack_step(session: bytes, deadline_s: float, seat: bytes, pos: int, token: int) -> Packed:
    """A step of one row."""
    return _STEP_MAP, _STEP.pack(
        _OP, session, _DEADLINE, deadline_s, seat, _POS, pos, _TOKEN, token
    )


def pack_steps(
    session: bytes, deadline_s: float, places: Sequence[tuple[bytes, int, int]]
) -> Packed:
    """A step of several rows, each its seat, pos and token."""
    pack = _PLACE.pack
    parts = [_HEAD.pack(_OP, session, _DEADLINE, deadline_s), _COUNT.pack(_ROWS, len(places))]
    parts += [_ROW_MAP + pack(seat, _POS, pos, _TOKEN, token) for seat, pos, token in places]
    return _STEPS_MAP, b"".join(parts)


def number(request: Packed, request_id: int) -> bytes:
    """The request as a frame."""
    first, rest = request
    return _NUMBER.pack(first, _ID, request_id) + rest


def read_steps(frame: bytes) -> StepsRequest | None:
    """A request of this layout with all fields in their ranges; None for any other frame."""
    if len(frame) == _STEP_LAYOUT.size:
        values = _STEP_LAYOUT.read(frame)
        return None if values is None else _steps(values, False, [values[3:]])
    count, rest = divmod(len(frame) - _ROWS_AT, _ROW_BYTES)
    values = None if rest or not 1 <= count <= _MAX_ROWS else _steps_layout(count).read(frame)
    if values is None:
        return None
    numbers = iter(values[3:])
    return _steps(values, True, list(zip(numbers, numbers, numbers, numbers, strict=True)))


def _steps(values: tuple[Any, ...], is_batch: bool, rows: list[Row]) -> StepsRequest | None:
    request_id, session, deadline_s = values[:3]
    if not 0 <= deadline_s <= _MAX_DEADLINE_S:
        return None
    return StepsRequest._make((request_id, session.decode(), deadline_s, is_batch, rows))


def pack_result(request_id: int, result: Result) -> bytes:
    """The reply to a step of one row."""
    context_len, token, logprob = result
    return _RESULT.pack(
        _RESULT_MAP, _ID, request_id, _OK, _LENGTH, context_len, _TOKEN, token, _LOGPROB, logprob
    )


def pack_results(request_id: int, results: Sequence[Result]) -> bytes:
    """The reply to a step of several rows, all of which have run."""
    pack = _RESULT_ROW.pack
    parts = [_RESULTS_HEAD.pack(_RESULTS_MAP, _ID, request_id, _OK, _ROWS, len(results))]
    parts += [
        pack(_ROW_LENGTH, context_len, _TOKEN, token, _LOGPROB, logprob)
        for context_len, token, logprob in results
    ]
    return b"".join(parts)


def read_results(frame: bytes) -> tuple[int, list[Result]] | None:
    """The request's number and the results in a reply of this layout; None for any other frame."""
    if len(frame) == _RESULT_LAYOUT.size:
        values = _RESULT_LAYOUT.read(frame)
        return None if values is None else (values[0], [values[1:]])
    count, rest = divmod(len(frame) - _RESULTS_HEAD.size, _RESULT_ROW.size)
    values = None if rest or not 1 <= count <= _MAX_ROWS else _results_layout(count).read(frame)
    if values is None:
        return None
    numbers = iter(values[1:])
    return values[0], list(zip(numbers, numbers, numbers, strict=True))
