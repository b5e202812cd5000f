"""Where settings come from: defaults, then a TOML file, then the environment, then flags."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentd.config import SETTINGS, Config
from latentd.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NO_SETTINGS = ("LATENTD_CONFIG", "LATENTD_CUBINS")
"""Variables that mean something but are no setting: the file, and what a build compiles."""


def flag_of(name: str) -> str:
    """The command line flag of a setting."""
    return SETTINGS[name].flag or "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return "LATENTD_" + name.upper()


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    config_file: str | None = None,
) -> Config:
    """Defaults, then the TOML file, then the environment, then flags; a later source wins.

    `flags` holds only the flags that were given, by field name. Without `config_file`,
    LATENTD_CONFIG names the TOML file, if any. Raises ConfigError for anything wrong anywhere,
    also for a value that a later source overrides.
    """
    values: dict[str, Any] = {}
    path = config_file or environ.get("LATENTD_CONFIG")
    if path:
        values.update(_from_toml(path))
    for name, row in SETTINGS.items():
        text = environ.get(variable_of(name))
        if text is not None:
            values[name] = row.check(name, row.parse(text), f"environment {variable_of(name)}")
    for name, given in flags.items():
        row = SETTINGS[name]
        value = row.parse(given) if isinstance(given, str) else given
        values[name] = row.check(name, value, f"flag {flag_of(name)}")
    return Config(**values)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A line for each LATENTD_* variable that is no setting, with the setting nearest to it. It is
    no error: an environment may be shared with other things of that name."""
    known = [*map(variable_of, SETTINGS), *NO_SETTINGS]
    for name in sorted(environ):
        if name.startswith("LATENTD_") and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"variable {name} is no setting and changes nothing{hint}"


def _from_toml(path: str) -> dict[str, object]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # tomllib's errors are ValueErrors
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    for key, value in table.items():
        if key not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise ConfigError(f"unknown key {key} = {value!r} in {path}; known keys: {known}")
    return {name: SETTINGS[name].check(name, value, path) for name, value in table.items()}
