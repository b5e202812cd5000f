"""Parsers whose errors take one line, and the flags that come from the table of settings."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

from latentd.config import SETTINGS
from latentd.settings import ConfigError
from latentd.sources import FILE_VARIABLE, read
from latentd_client.variables import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from latentd.config import Config
    from latentd.settings import Setting
    from latentd.sources import Effective

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
"""Exit codes; 78 is EX_CONFIG of sysexits.h (systemd does not restart it), see also `leaving`."""
INSTALL = "pip install '.[daemon]' from a checkout, or with the path of a wheel in place of the dot"
"""How the daemon's requirements are installed, in README's words."""


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line and leaves with `usage_code`."""

    usage_code = EXIT_USAGE

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(self.usage_code)

    def refuse(self, unknown: list[str]) -> NoReturn:
        """The same for arguments that nobody took; of a flag with the nearest that there is."""
        flags = [flag.partition("=")[0] for flag in unknown if flag.startswith("--")]
        hints = [nearest(flag, self._option_string_actions) for flag in flags]
        self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints[:1])}")


def add_command(
    subparsers: argparse._SubParsersAction[Parser],
    name: str,
    help: str,
    run: Callable[[argparse.Namespace], int],
    usage_code: int = EXIT_USAGE,
) -> Parser:
    """A subcommand that `run` carries out; `usage_code` is the exit code of a bad command line."""
    parser = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.usage_code = usage_code
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_settings(parser: Parser, groups: Iterable[str]) -> None:
    """Add the flags of some groups of settings, and --config-file."""
    about = parser.add_argument_group("configuration", "flags win over LATENTD_*, over the file")
    about.add_argument("--config-file", metavar="FILE", help=f"TOML file (or {FILE_VARIABLE})")
    for title in groups:
        group = parser.add_argument_group(title)
        for row in SETTINGS.values():
            if row.group == title:
                add_setting(group, row)


def add_setting(group: argparse._ArgumentGroup, row: Setting) -> None:
    """Add the flag of one setting; its text is parsed and checked later, as other sources' are."""
    if row.kind == "bool":
        group.add_argument(
            row.flag, dest=row.name, help=row.help, default=argparse.SUPPRESS,
            action=argparse.BooleanOptionalAction,
        )  # fmt: skip
        return
    text = f"{row.help} (default {row.default})" if row.has_default else row.help
    metavar = "{" + ",".join(row.choices) + "}" if row.choices else row.kind.upper()
    group.add_argument(
        row.flag, dest=row.name, help=text, default=argparse.SUPPRESS, metavar=metavar
    )


def read_settings(args: argparse.Namespace) -> Effective:
    """The settings of a command line made with add_settings. Raises ConfigError."""
    flags = {name: value for name, value in vars(args).items() if name in SETTINGS}
    return read(flags, config_file=args.config_file)


def read_config(args: argparse.Namespace) -> Config:
    """The same without where they come from."""
    return read_settings(args).config


def require_extra(extra: str, module: str) -> None:
    """Refuse to go on without the module that an extra, of the command's name, installs."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        install = INSTALL.replace("daemon", extra)
        raise ConfigError(f"{extra} needs {module}: {install}") from None


def require_daemon(command: str) -> None:
    """Refuse to go on without what the [daemon] extra installs."""
    for module in ("torch", "safetensors", "cuda.bindings"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            raise ConfigError(f"{command} needs {module}: {INSTALL}") from None
