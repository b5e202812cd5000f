"""Whether a request's header has the fields of its operation, each of its type and in its range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client.errors import RequestRejected
from latentd_client.fields import MAX_INT, MAX_SEQUENCE

if TYPE_CHECKING:
    from latentd_client.fields import Field
    from latentd_client.protocol import Header


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
    elif field.kind == "seats":
        for index, item in enumerate(value):
            if not (
                type(item) is list and len(item) == 3
                and all(type(n) is int and 0 <= n <= MAX_INT for n in item)
            ):  # fmt: skip
                raise _invalid(where, field, f"[{index}] is not [slot, epoch, pos]")
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
