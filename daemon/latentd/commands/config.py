"""`latentd config`: the settings as they would be, and where each comes from; starts nothing."""

from __future__ import annotations

import json
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
from latentd.settings_text import effective_lines

if TYPE_CHECKING:
    import argparse

    from latentd.sources import Effective


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    about = "print the settings that `serve` would have, and where each comes from"
    parser = add_command(subparsers, "config", about, run, EXIT_CONFIG)
    parser.add_argument("--json", action="store_true", help="print them as JSON, not as TOML")
    add_settings(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Print them: as a file that `--config-file` takes, or as JSON."""
    effective = read_settings(args)
    if args.json:
        print(json.dumps(as_json(effective), indent=2))
    else:
        print("\n".join(effective_lines(effective)))
    return 0


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
