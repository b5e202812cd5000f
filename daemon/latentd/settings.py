"""One setting: its names, how a text becomes its value, what a good value is, how a bad one is
refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from latentd import accounts
from latentd_client import protocol

Kind = Literal["text", "path", "endpoint", "int", "float", "bool", "pages", "users", "groups"]


class ConfigError(ValueError):
    """A setting that cannot be used; the text names key, value, range and source."""


_TRUTH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
MOST_TOLD: Final = 400
"""Most characters of a value in a message."""


@dataclass(frozen=True)
class Setting:
    """A row of the table of settings.

    `name` is the field of Config and the key in TOML; `group` the subject in the help; low and high
    bound numbers, both ends included; choices list the texts allowed; `own_flag` replaces the usual
    --name; a reload changes what is `reloadable`. A `default` of None or "" means "not given".
    """

    name: str
    group: str
    default: object
    help: str
    kind: Kind = "text"
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    own_flag: str = ""
    reloadable: bool = False

    @property
    def flag(self) -> str:
        """The flag of the command line; a bool has --no- in front of it as well."""
        return self.own_flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "LATENTD_" + self.name.upper()

    @property
    def has_default(self) -> bool:
        """Whether there is a value where nobody gives one."""
        return self.default not in (None, "")

    @property
    def expected(self) -> str:
        """What a good value looks like, for messages and help."""
        texts: dict[Kind, str] = {
            "int": f"a whole number from {self.low} to {self.high}",
            "float": f"a number from {self.low:g} to {self.high:g}",
            "bool": "true or false",
            "pages": f"0, auto, or a number of pages up to {self.high}",
            "endpoint": "ipc:///absolute/path or tcp://host:port, the port 0 to 65535 or *",
            "path": "a path of printable characters",
            "users": "known users by name or id, with commas between them",
            "groups": "known groups by name or id, with commas between them",
            "text": " or ".join(self.choices) or "a text of printable characters",
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

    def check(self, value: object, source: object) -> object:
        """The value as the field holds it. Raises ConfigError naming key, value, range, source."""
        if not self._accepts(value):
            raise self._refusal(value, source, self.expected)
        if self.kind != "path":
            return float(str(value)) if self.kind == "float" else value
        try:
            return Path(str(value)).expanduser()
        except RuntimeError:  # ~ of a user that is not there
            raise self._refusal(value, source, "a path whose ~ is a known user's") from None

    def _refusal(self, value: object, source: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.name} = {told(value)} (from {source}): expected {expected}")

    def _accepts(self, value: object) -> bool:
        if isinstance(value, bool):
            return self.kind == "bool"
        if isinstance(value, int):
            return self.kind in ("int", "float", "pages") and self.low <= value <= self.high
        if isinstance(value, float):
            return self.kind == "float" and self.low <= value <= self.high
        if not isinstance(value, str) or not value.isprintable():
            return False
        if self.kind == "endpoint":
            return value.startswith(("ipc:///", "tcp://")) and protocol.has_port(value)
        if self.kind == "pages":
            return value == "auto"
        if self.kind in ("users", "groups"):
            return bool(value) and accounts.ids(self.kind, value) is not None
        if self.kind == "path":
            return bool(value)
        return self.kind == "text" and (value in self.choices if self.choices else bool(value))


def told(value: object) -> str:
    """A value as messages tell it: on one line, and cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits, which a file can write in hexadecimal
        return "a number too long to tell"
    return text if len(text) <= MOST_TOLD else text[:MOST_TOLD] + "..."


def setting(group: str, default: object, help: str, kind: Kind = "text", **rest: Any) -> Any:
    """A field of Config and its row of the table, in one; `rest` is the row's."""
    row = {"group": group, "default": default, "help": help, "kind": kind, **rest}
    return field(default=default, metadata=row)


def rows(fields: tuple[Any, ...]) -> dict[str, Setting]:
    """The table that the fields of a dataclass carry, by name and in their order."""
    return {item.name: Setting(item.name, **item.metadata) for item in fields}
