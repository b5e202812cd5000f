"""One setting: how a text becomes its value, what a good value is, how a bad one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["text", "path", "endpoint", "int", "float", "bool", "pages"]


class ConfigError(ValueError):
    """A setting that cannot be used; the text names key, value, range and source."""


_TRUTH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


@dataclass(frozen=True)
class Setting:
    """A row of the table of settings.

    `group` is the subject in the help; low and high bound numbers, both ends included; choices
    list the texts allowed; `flag` replaces the usual --name.
    """

    group: str
    help: str
    kind: Kind = "text"
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    flag: str = ""
    reloadable: bool = False

    @property
    def expected(self) -> str:
        """What a good value looks like, for messages and help."""
        texts: dict[Kind, str] = {
            "int": f"a whole number from {self.low} to {self.high}",
            "float": f"a number from {self.low:g} to {self.high:g}",
            "bool": "true or false",
            "pages": f"0, auto, or a number of pages up to {self.high}",
            "endpoint": "ipc:///absolute/path or tcp://host:port",
            "path": "a path",
            "text": " or ".join(self.choices) or "a text",
        }
        return texts[self.kind]

    def parse(self, text: str) -> object:
        """The typed value of a text; a text that does not parse stays one, for check to refuse."""
        try:
            if self.kind == "int" or (self.kind == "pages" and text != "auto"):
                return int(text)
            if self.kind == "float":
                return float(text)
        except ValueError:
            return text
        return _TRUTH.get(text.lower(), text) if self.kind == "bool" else text

    def check(self, name: str, value: object, source: str) -> object:
        """The value as the field holds it. Raises ConfigError naming key, value, range, source."""
        if not self._accepts(value):
            raise ConfigError(f"{name} = {value!r} (from {source}): expected {self.expected}")
        if self.kind == "path":
            return Path(str(value)).expanduser()
        return float(str(value)) if self.kind == "float" else value

    def _accepts(self, value: object) -> bool:
        if isinstance(value, bool):
            return self.kind == "bool"
        if isinstance(value, int):
            return self.kind in ("int", "float", "pages") and self.low <= value <= self.high
        if isinstance(value, float):
            return self.kind == "float" and self.low <= value <= self.high
        if not isinstance(value, str):
            return False
        if self.kind == "endpoint":
            return value.startswith(("ipc:///", "tcp://"))
        if self.kind == "pages":
            return value == "auto"
        if self.kind == "path":
            return bool(value)
        return self.kind == "text" and (value in self.choices if self.choices else bool(value))
