"""Steps and their replies in one fixed layout, made and read several times faster.

The maps of docs/protocol.md may hold their keys in any order and their numbers in any width. Here
the order is one and the widths are fixed, so that a struct packs keys and values at once. Whoever
reads looks for the layout by its bytes; all else goes through `protocol`, and means the same.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
_MAX_INT: Final = (1 << 31) - 1  # of a slot and a token; `fields` has these bounds
_MAX_EPOCH: Final = (1 << 63) - 1
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
_WHOLE_STEP: Final = Struct(">B7sI18s48s12sd6sI7sQ5sI7sI")
_ROW: Final = Struct(">7sI7sQ5sI7sI")
_RESULT: Final = Struct(">B7sI10s13sI7sI9sd")
_RESULTS_HEAD: Final = Struct(">B7sI10s6sH")
_RESULT_ROW: Final = Struct(">24sI7sI9sd")
_COUNT_AT: Final = _NUMBER.size + _HEAD.size
_ROWS_AT: Final = _COUNT_AT + _COUNT.size
_ROW_SLOT: Final = _ROW_MAP + _SLOT
_ROW_LENGTH: Final = _OK_MAP + _OK + _LENGTH


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
    if len(frame) == _WHOLE_STEP.size:
        (
            first, id_key, request_id, op, session, deadline_key, deadline_s,
            slot_key, slot, epoch_key, epoch, pos_key, pos, token_key, token,
        ) = _WHOLE_STEP.unpack(frame)  # fmt: skip
        if (
            first == _STEP_MAP and id_key == _ID and op == _OP and deadline_key == _DEADLINE
            and slot_key == _SLOT and epoch_key == _EPOCH and pos_key == _POS
            and token_key == _TOKEN and slot <= _MAX_INT and token <= _MAX_INT
            and epoch <= _MAX_EPOCH and 0 <= deadline_s <= _MAX_DEADLINE_S and session.isascii()
        ):  # fmt: skip
            row = (slot, epoch, pos, token)
            return StepsRequest(request_id, session.decode(), deadline_s, False, [row])
    elif len(frame) >= _ROWS_AT and frame[0] == _STEPS_MAP:
        return _read_batch(frame)
    return None


def _read_batch(frame: bytes) -> StepsRequest | None:
    _, id_key, request_id = _NUMBER.unpack_from(frame)
    op, session, deadline_key, deadline_s = _HEAD.unpack_from(frame, _NUMBER.size)
    rows_key, count = _COUNT.unpack_from(frame, _COUNT_AT)
    if (
        id_key != _ID or op != _OP or deadline_key != _DEADLINE or rows_key != _ROWS
        or not 0 <= deadline_s <= _MAX_DEADLINE_S or not session.isascii()
        or not 1 <= count <= _MAX_ROWS or len(frame) != _ROWS_AT + count * _ROW.size
    ):  # fmt: skip
        return None
    rows = _read_rows(_ROW.iter_unpack(memoryview(frame)[_ROWS_AT:]))
    if len(rows) != count:
        return None
    return StepsRequest(request_id, session.decode(), deadline_s, True, rows)


def _read_rows(columns: Iterable[tuple[Any, ...]]) -> list[Row]:
    """The rows that have the right keys and values in their ranges."""
    return [
        (slot, epoch, pos, token)
        for slot_key, slot, epoch_key, epoch, pos_key, pos, token_key, token in columns
        if slot_key == _ROW_SLOT and epoch_key == _EPOCH and pos_key == _POS and token_key == _TOKEN
        and slot <= _MAX_INT and token <= _MAX_INT and epoch <= _MAX_EPOCH
    ]  # fmt: skip


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
    size = len(frame)
    if size == _RESULT.size and frame[0] == _RESULT_MAP:
        (
            _, id_key, request_id, ok, length_key, context_len, token_key, token,
            logprob_key, logprob,
        ) = _RESULT.unpack(frame)  # fmt: skip
        if (
            id_key != _ID or ok != _OK or length_key != _LENGTH or token_key != _TOKEN
            or logprob_key != _LOGPROB
        ):  # fmt: skip
            return None
        return request_id, [(context_len, token, logprob)]
    if size < _RESULTS_HEAD.size or frame[0] != _RESULTS_MAP:
        return None
    _, id_key, request_id, ok, rows_key, count = _RESULTS_HEAD.unpack_from(frame)
    if (
        id_key != _ID or ok != _OK or rows_key != _ROWS
        or size != _RESULTS_HEAD.size + count * _RESULT_ROW.size
    ):  # fmt: skip
        return None
    rows = _read_results(_RESULT_ROW.iter_unpack(memoryview(frame)[_RESULTS_HEAD.size :]))
    return (request_id, rows) if len(rows) == count else None


def _read_results(columns: Iterable[tuple[Any, ...]]) -> list[Result]:
    return [
        (context_len, token, logprob)
        for length_key, context_len, token_key, token, logprob_key, logprob in columns
        if length_key == _ROW_LENGTH and token_key == _TOKEN and logprob_key == _LOGPROB
    ]
