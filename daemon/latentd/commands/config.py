"""`latentd config`: the settings as they would be, and where each comes from; starts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.commands.parsing import (
    EXIT_CONFIG,
    Parser,
    add_command,
    add_settings,
    read_settings,
)
from latentd.config import GROUPS
from latentd.preflight import check_forms, hindrances
from latentd.settings import ConfigError
from latentd.settings_text import effective_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from latentd.config import Config
    from latentd.sources import Effective


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    about = "print the settings that `serve` would have, and where each comes from"
    parser = add_command(subparsers, "config", about, run, EXIT_CONFIG)
    parser.epilog = (
        "What no machine could serve is refused as by serve (exit code 78). What serve would stop "
        "at here and now, started by this user, is told on stderr; check looks at a checkpoint."
    )
    parser.add_argument("--json", action="store_true", help="print them as JSON, not as TOML")
    add_settings(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Print them: as a file that `--config-file` takes, or as JSON. What can never be served is
    refused as `serve` does; what depends on this machine, its files and who asks is only told."""
    effective = read_settings(args)
    check_forms(effective.config.server_options())
    if args.json:
        print(json.dumps(as_json(effective), indent=2))
    else:
        print("\n".join(effective_lines(effective)))
    for text in dict.fromkeys(_obstacles(effective.config)):
        print(f"{args.parser.prog}: serve would stop here: {text}", file=sys.stderr)
    return 0


def _obstacles(config: Config) -> Iterator[str]:
    """What `serve` would stop at. That no model is named is one: it may come with a flag, as the
    other settings from a file."""
    model_dir = None
    try:
        model_dir = config.engine_options().model_dir
    except ConfigError as error:
        yield str(error)
    yield from hindrances(config.server_options(), model_dir)


def as_json(effective: Effective) -> dict[str, dict[str, object]]:
    """By name: `value` (null: not given), `origin` (default, file, environment or flag), and
    `source`, the file's path, the variable or the flag (null for a default)."""
    plain: dict[str, dict[str, object]] = {}
    for name, origin in effective.origins.items():
        value = getattr(effective.config, name)
        value = str(value) if isinstance(value, Path) else value
        plain[name] = {
            "value": None if value == "" else value,
            "origin": origin.kind,
            "source": origin.name or None,
        }
    return plain
