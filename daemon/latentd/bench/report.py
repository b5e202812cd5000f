"""What a benchmark prints: facts, then tables line by line as they are measured; or all as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """One column: its key in the JSON, its title, and the digits after a number's point. Width 0
    is for words in the last column, which end where they end."""

    key: str
    title: str
    digits: int = 0
    width: int = 9

    def cell(self, value: Value) -> str:
        """The value as the table shows it; a value that was not measured is a dash."""
        text = "-" if value is None else str(value)
        if isinstance(value, float):
            text = f"{value:.{self.digits}f}"
        return f"{text:>{self.width}}" if self.width else f"  {text}"


class Report:
    """Facts, notes and tables of one run. Tables print at once; as JSON, all comes at the end."""

    def __init__(self, out: TextIO, as_json: bool) -> None:
        self.as_json = as_json
        self._out = out
        self._facts: dict[str, object] = {}
        self._notes: list[str] = []
        self._tables: dict[str, list[dict[str, Value]]] = {}
        self._columns: Sequence[Column] = ()
        self._rows: list[dict[str, Value]] = []

    def facts(self, **facts: object) -> None:
        """Name what was measured and where: `key value` on one line."""
        self._facts |= facts
        self._print(", ".join(f"{_words(key)} {value}" for key, value in facts.items()))

    def note(self, text: str) -> None:
        """Say something that a reader of the figures must know."""
        self._notes.append(text)
        self._print(text)

    def table(self, name: str, about: str, columns: Sequence[Column]) -> None:
        """Begin a table; `add` fills it."""
        self._columns, self._rows = columns, []
        self._tables[name] = self._rows
        self._print(f"\n{about}")
        self._print("".join(column.cell(column.title) for column in columns))

    def add(self, **values: Value) -> None:
        """Add a row to the table that was begun last; keys that have no column are JSON only."""
        self._rows.append(values)
        self._print("".join(column.cell(values.get(column.key)) for column in self._columns))

    def close(self) -> None:
        """Print the JSON, if that was asked for."""
        if self.as_json:
            whole = {**self._facts, "notes": self._notes, "tables": self._tables}
            print(json.dumps(whole, indent=2), file=self._out)

    def _print(self, line: str) -> None:
        if not self.as_json:
            print(line, file=self._out, flush=True)


def _words(key: str) -> str:
    return key.replace("_tb_per_s", " TB/s").replace("_", " ")
