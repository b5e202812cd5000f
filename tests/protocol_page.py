"""docs/protocol.md as data: its examples, and its tables of fields, whose types come from
latentd_client.fields."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from latentd_client import fields

if TYPE_CHECKING:
    from latentd_client.fields import Field

PATH: Final = Path(__file__).parents[1] / "docs" / "protocol.md"
HEADING: Final = "| field | type | |"
SECTIONS: Final = {"Bias and masks": "step"}
"""Sections with a table of fields whose title does not begin with their operation's name."""


@dataclass(frozen=True)
class Example:
    """A message on the page: its section, the header, and all frames, the header's first."""

    section: str
    header: dict[str, Any]
    frames: list[bytes]


def read_examples(page: str) -> list[Example]:
    """All examples of the page, in its order."""
    examples = []
    for title, text in sections(page):
        for block in re.findall(r"```frame\n(.*?)```", text, re.DOTALL):
            header, _, dump = block.partition("\n")
            frames = [bytes.fromhex(part) for part in dump.split("--")]
            examples.append(Example(title, json.loads(header), frames))
    return examples


def sections(page: str) -> list[tuple[str, str]]:
    """Title and text of each section of the second level."""
    parts = page.split("\n## ")[1:]
    return [(part.partition("\n")[0], part) for part in parts]


def with_types(page: str) -> str:
    """The page with the types of latentd_client.fields in its tables of fields. Raises ValueError
    for a field that is missing, or that the operation does not have."""
    parts = page.split("\n## ")
    for index, part in enumerate(parts):
        title = part.partition("\n")[0]
        if HEADING in part and title != "Frames":
            before, heading, rest = part.partition(HEADING)
            rows, gap, after = rest.partition("\n\n")
            parts[index] = before + heading + _table(title, rows) + gap + after
    return "\n## ".join(parts)


def _table(title: str, text: str) -> str:
    op = SECTIONS.get(title) or re.split(r"\W", title)[0]
    table = {field.name: field for field in fields.OPS[op]}
    first, rule, *rows = text.split("\n")
    named = [name for row in rows for name in _names(row)]
    if title not in SECTIONS and sorted(named) != sorted(table):
        raise ValueError(f"{title}: the page has {sorted(named)}, fields.py {sorted(table)}")
    return "\n".join([first, rule, *(_row(op, table, row) for row in rows)])


def _names(row: str) -> list[str]:
    return re.findall(r"`(\w+)`", row.split("|")[1])


def _row(op: str, table: dict[str, Field], row: str) -> str:
    """A row with its types; one without any says in which operation its fields are the same."""
    _, names, types, meaning = row.split("|", 3)
    own = [table[name] for name in _names(row)]
    if types.strip():
        return f"|{names}| {'; '.join(dict.fromkeys(map(type_text, own)))} |{meaning}"
    said = re.match(r" as in (\w+)", meaning)
    if said is None or not set(own) <= set(fields.OPS[said[1]]):
        raise ValueError(f"{op}: {names} have no type, and are not as in another operation")
    return row


def type_text(field: Field) -> str:
    """A field's type and bounds as the page says them."""
    return _kind(field) + ("" if field.required else ", optional")


def _kind(field: Field) -> str:
    if field.kind == "int":
        return "int" + _bounds(field)
    if field.kind == "float":
        return "number" + _bounds(field)
    if field.kind == "str":
        return f"text, {_length(field)}"
    if field.kind == "prompt":
        return f'list of {_length(field)} ints, or `{{"raw": i}}` of an int32 frame [n]'
    items = {"ints": "ints", "id lists": f"lists of 1 to {fields.MAX_SEQUENCE} ints",
             "seats": "[slot, epoch, pos]", "list": "maps"}  # fmt: skip
    if field.kind in items:
        return f"list of {_length(field)} {items[field.kind]}"
    return {"bool": "bool", "map": "map", "tensor": "raw frame"}[field.kind]


def _bounds(field: Field) -> str:
    if field.high == fields.MAX_INT:
        return f", from {field.low}" if field.low else ""
    return f", {_number(field.low)} to {_number(field.high)}"


def _length(field: Field) -> str:
    if field.low == field.high:
        return str(field.low)
    return f"{field.low} to {_number(field.high)}" if field.low else f"up to {_number(field.high)}"


def _number(value: float) -> str:
    """2^31 - 1 and the like by their names."""
    for bits in (20, 31, 63, 64):
        if value in (1 << bits, (1 << bits) - 1):
            return f"2^{bits}" + (" - 1" if value != 1 << bits else "")
    return f"{value:g}".replace("e+0", "e")
