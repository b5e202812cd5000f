"""What the table of settings gives outside the code:

    python tests/settings_files.py

writes docs/settings.md and the example systemd/latentd.toml from latentd.config (`make settings`).
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd.config import GROUPS, SETTINGS
from latentd.settings_rules import RULES
from latentd.settings_text import toml
from latentd.sources import NO_SETTINGS
from latentd_client.protocol import DEFAULT_ENDPOINT, control_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latentd.settings import Setting

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/settings.md"
EXAMPLE: Final = ROOT / "systemd/latentd.toml"
ACTIVE: Final = {"model": "/var/lib/latentd/model", "kv_pages": "auto"}
"""What the example sets, by name."""
SHOWN: Final = {
    "name": "served",
    "model_config": "/var/lib/latentd/shape",
    "control_endpoint": control_endpoint(DEFAULT_ENDPOINT),
    "allow_users": "1001, 1002",
    "allow_groups": "1001",
    "admin_users": "1001",
    "curve_key": "/etc/latentd/curve.key",
    "curve_clients": "/etc/latentd/curve.clients",
    "curve_admins": "/etc/latentd/curve.admins",
    "save": "/var/lib/latentd/saved/snapshot",
    "restore": "/var/lib/latentd/saved/snapshot",
}
"""What it shows in a comment where there is no default."""
NOTES: Final = {
    "model": "outside /home, which the unit hides",
    "kv_pages": "a service has the device to itself; the default is 0",
}
"""What is to be said of a setting in a service only."""
ABOUT_PAGE: Final = """# Settings

Made by `make settings` from the table in [daemon/latentd/config.py](../daemon/latentd/config.py); a
test holds it current.

A setting has three names: a flag of the command line, a variable of the environment and a key of a
TOML file, which `--config-file FILE` or `LATENTD_CONFIG` names. Flags win over variables, variables
over the file, the file over defaults. Each source is checked whole, also what another one
overrides: a flag, variable or key that is unknown, and a value that cannot be, is refused by name
with its source and what is expected (exit code 78), before anything is loaded. `latentd config`
prints all settings as they would be, and where each comes from; it takes the flags of `serve`, and
what it prints is such a file. With `--json` it tells the same to programs. What no machine could
serve, such as tcp for other machines without CURVE, it refuses as `serve` does; on stderr it tells
what `serve`, started by the same user, would stop at on this machine as it is: no model, or no
config.json there, a file of keys that cannot be read, no directory for sockets or snapshots. It
does not look at the weights (`latentd check` does), at a snapshot, or for another daemon.

In a variable 1, true, yes and on are true, 0, false, no and off are false; the flags are `--eager`
and `--no-eager`. A path may begin with `~`. What has "reload" beside it changes with SIGHUP
(`systemctl reload`), from the file; all else needs a restart, and a reload names each that has
changed.
"""
HEAD: Final = """\
| key | flag, variable | default | what it is | values |
| --- | --- | --- | --- | --- |
"""
ABOUT_VARIABLES: Final = """
## Variables that are no settings

All other variables that begin with `LATENTD_` are refused by every command of `latentd` (exit code
78 of those that read settings, 2 of the others), but for names kept for the other programs that
serve (`LATENTD_OPENAI_*`, `LATENTD_METRICS_*`) and those that Kubernetes sets for a service whose
name begins with latentd (`LATENTD_SERVICE_HOST`, `LATENTD_PORT` and their like). These programs
have flags and refuse such names themselves; `latentd-openai` also refuses what looks like a slip of
a variable that it reads (exit code 2), and lets the daemon's settings through.

| variable | what it names |
| --- | --- |
"""
ABOUT_EXAMPLE: Final = """\
# Settings of latentd, made by `make settings`; lines behind a # show defaults, or an example where
# there is none. Every key is also a flag (--max-ctx) and a variable (LATENTD_MAX_CTX), which win
# over this file. `latentd config` prints what is in effect and where it comes from. A key or value
# that is wrong stops the start.
"""


def page() -> str:
    """docs/settings.md."""
    variables = "".join(f"| `{name}` | {text} |\n" for name, text in NO_SETTINGS.items())
    rules = "".join(f"- {rule.text}\n" for rule in RULES)
    groups = "".join(map(_group, GROUPS))
    return f"{ABOUT_PAGE}{groups}\n## Together\n\n{rules}{ABOUT_VARIABLES}{variables}"


def _group(group: str) -> str:
    rows = "".join(map(_row, _rows(group)))
    return f"\n## {group.capitalize()}\n\n{HEAD}{rows}"


def _rows(group: str) -> Iterator[Setting]:
    return (row for row in SETTINGS.values() if row.group == group)


def _row(row: Setting) -> str:
    default = f"`{toml(row.default)}`" if row.has_default else "-"
    values = row.expected + ("; reload" if row.reloadable else "")
    names = f"`{row.flag}`, `{row.variable}`"
    return f"| `{row.name}` | {names} | {default} | {row.help} | {values} |\n"


def example() -> str:
    """systemd/latentd.toml: what a service sets, and all else in comments."""
    return ABOUT_EXAMPLE + "".join(f"{line}\n" for group in GROUPS for line in _example(group))


def _example(group: str) -> Iterator[str]:
    yield from ("", f"# -- {group} --")
    for row in _rows(group):
        about = f"{row.help}: {row.expected}" + ("; changed by a reload" if row.reloadable else "")
        note = f" ({NOTES[row.name]})" if row.name in NOTES else ""
        yield ""
        yield from textwrap.wrap(about + note, 118, initial_indent="# ", subsequent_indent="# ")
        if row.name in ACTIVE:
            yield f"{row.name} = {toml(ACTIVE[row.name])}"
        else:
            yield f"# {row.name} = {toml(row.default if row.has_default else SHOWN[row.name])}"


def files() -> dict[Path, str]:
    """What this module writes, by path."""
    return {PAGE: page(), EXAMPLE: example()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
