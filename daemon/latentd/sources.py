"""Where settings come from: defaults, then a TOML file, then the environment, then flags. Each
source refuses by name what it does not know and values that cannot be."""

from __future__ import annotations

import os
import re
import tomllib
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from latentd.config import SETTINGS, Config
from latentd.settings import ConfigError, told
from latentd.settings_rules import Contradiction
from latentd_client import keys
from latentd_client.variables import OF_KUBERNETES, PREFIX, nearest, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_VARIABLE: Final = "LATENTD_CONFIG"
NO_SETTINGS: Final = {
    FILE_VARIABLE: "the TOML file; `--config-file` wins",
    keys.FILE_VARIABLE: "a client's key pair, see security.md",
    keys.SERVER_VARIABLE: "to a client, the daemon's public key",
    "LATENTD_CUBINS": "what building the package compiles, see README.md",
    "LATENTD_WHEEL": "the folder of the wheel that `make test` looks at",
    "LATENTD_TRANSCRIPT": "where `make systemd-test` writes what it saw",
}
"""Variables that mean something but are no settings, and what."""
MOST_BYTES: Final = 1 << 20
"""Most bytes of a TOML file."""
OF_THE_DOORS: Final = re.compile(r"LATENTD_(OPENAI|METRICS)_\w+")
"""What may be given to the other programs that serve, in an environment which all of them share."""


class Origin(NamedTuple):
    """Where a value comes from; `name` is the file's path, the variable or the flag."""

    kind: Literal["default", "file", "environment", "flag"]
    name: str = ""

    def __str__(self) -> str:
        return self.name if self.kind == "file" else f"{self.kind} {self.name}".rstrip()


class Effective(NamedTuple):
    """The settings, and by their names where each comes from."""

    config: Config
    origins: dict[str, Origin]


def read(
    flags: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    config_file: str | None = None,
) -> Effective:
    """Defaults, then the TOML file, then the environment, then flags; a later source wins.

    `flags` holds only the flags that were given, by field name. Without `config_file`,
    LATENTD_CONFIG names the TOML file, if any. Raises ConfigError for anything wrong anywhere,
    also for a value that a later source overrides; unknown variables are `refuse_unknown`'s.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, Origin("default"))
    path = config_file or environ.get(FILE_VARIABLE)
    from_file = _from_file(path) if path else ()
    for origin, name, value in chain(from_file, _from_environ(environ), _from_flags(flags)):
        values[name] = SETTINGS[name].check(value, origin)
        origins[name] = origin
    try:
        return Effective(Config(**values), origins)
    except Contradiction as error:
        given = [
            f"{name} = {str(values[name])!r} from {origins[name]}"
            for name in error.names
            if name in values
        ]
        raise ConfigError(f"{error} (here {', '.join(given)})") from None


def refuse_unknown(environ: Mapping[str, str], command: str = "") -> None:
    """Raises ConfigError for a variable LATENTD_* that nobody reads. Those of another program that
    serves are let through, those of `command` itself are not: it has flags."""
    known = [row.variable for row in SETTINGS.values()] + list(NO_SETTINGS)
    for variable in sorted(environ.keys() - set(known)):
        if not variable.startswith(PREFIX) or OF_KUBERNETES.fullmatch(variable):
            continue
        door = OF_THE_DOORS.fullmatch(variable)
        if door is None or door[1].lower() == command:
            raise ConfigError(unknown(variable, known, "`latentd config --help` for all"))


def _from_file(path: str) -> Iterator[tuple[Origin, str, object]]:
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        table = tomllib.loads(text.decode())
    except (OSError, ValueError, RecursionError) as error:  # tomllib's errors are ValueErrors
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    for key, value in table.items():
        if key not in SETTINGS:
            hint = (
                "; keys stand in no [table]" if isinstance(value, dict) else nearest(key, SETTINGS)
            )
            raise ConfigError(
                f"unknown key {key} = {told(value)} in {path}{hint} (`latentd config` lists all)"
            )
        yield Origin("file", path), key, value


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[Origin, str, object]]:
    for row in SETTINGS.values():
        if (text := environ.get(row.variable)) is not None:
            yield Origin("environment", row.variable), row.name, row.parse(text)


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[Origin, str, object]]:
    """Unknown flags never come here: the parser refuses them."""
    for name, given in flags.items():
        row = SETTINGS[name]
        yield Origin("flag", row.flag), name, row.parse(given) if isinstance(given, str) else given
