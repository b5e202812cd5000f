"""`latentd install-units`: puts the systemd units, the account and an example of the settings where
systemd looks for them. It starts nothing, and never touches settings that are there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import latentd
from latentd.commands.parsing import EXIT_FAILED, Parser, add_command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator

UNITS: Final = "etc/systemd/system"
FILES: Final = (
    "latentd.service", "latentd@.service", "latentd.socket", "latentd@.socket",
    "latentd-directory@.service",
)  # fmt: skip
PLACES: Final = {
    **{name: f"{UNITS}/{name}" for name in FILES},
    "sysusers": "etc/sysusers.d/latentd.conf",
}
OPTIONAL: Final = {name: f"latentd-{name}.service" for name in ("openai", "metrics")}
"""Units of the programs beside the daemon, by the word that asks for them."""
SETTINGS: Final = "etc/latentd/latentd.toml"
WRITTEN_FOR: Final = "/usr/bin/latentd"
"""The program that the units name as they are in the repository."""
DOOR: Final = "latentd-openai"
"""The one beside it."""
HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What ProtectHome and PrivateTmp hide from the daemon."""
PLAIN: Final = re.compile(r"/[\w/.+@-]+")
"""Paths that mean themselves in a command line of systemd."""
REMEDY: Final = (
    "install latentd for all users, for example with `python3 -m venv /opt/latentd` and "
    "/opt/latentd/bin/pip"
)
NEXT: Final = """next:
  systemd-sysusers                          # makes the account latentd; clients join its group
  edit /etc/latentd/latentd.toml            # at least model = "..."
  systemctl daemon-reload
  systemctl enable --now latentd            # or latentd@0, with /etc/latentd/0.toml, for GPU 0"""


class NotInstalled(Exception):
    """The units cannot be put in place; the text names what, where and what to do."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    about = "install the systemd units, the account and example settings"
    parser = add_command(subparsers, "install-units", about, run)
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR",
        help="install below this directory, for a package or an image (default /)",
    )  # fmt: skip
    parser.add_argument(
        "--with", action="append", choices=OPTIONAL, default=[], dest="doors",
        help="the unit of a program beside the daemon too, more than one by repeating it; one that "
        "is there already is brought up to date anyway",
    )  # fmt: skip
    parser.add_argument(
        "--program", type=Path, metavar="PATH",
        help="the latentd that the units start, in --root or on this machine (default: the one "
        "beside this Python)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Install and say what was done; returns the exit code."""
    try:
        for line in install(args.root, args.program, args.doors):
            print(line)
    except NotInstalled as error:
        print(f"latentd install-units: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(NEXT)
    for door in dict.fromkeys(args.doors):
        print(f"  systemctl enable --now latentd-{door}")
    return 0


def install(root: Path, program: Path | None, doors: Collection[str] = ()) -> Iterator[str]:
    """Put the files below `root`, with units that start `program` or the one beside this Python; a
    line for each. Raises NotInstalled, about the programs before anything is written."""
    is_ours = program is None
    program = program or Path(sys.executable).parent / "latentd"
    beside = program.with_name(DOOR)
    faults = dict.fromkeys(find_faults(program, is_ours, root))
    if "openai" in doors:
        faults |= dict.fromkeys(find_faults(beside, is_ours, root))
    if faults:
        raise NotInstalled("; ".join(faults))
    for name, place in (PLACES | optional_places(root, doors)).items():
        text = (source() / name).read_text()
        for there, here in ((WRITTEN_FOR, program), (f"/usr/bin/{DOOR}", beside)):
            text = text.replace(f"={there} ", f"={here} ")
        yield put(root / place, text)
    settings = root / SETTINGS
    if settings.exists():
        yield f"kept       {settings}"
    else:
        yield put(settings, (source() / "latentd.toml").read_text())


def optional_places(root: Path, doors: Collection[str]) -> dict[str, str]:
    """Of the optional units those that are asked for, or there; file to place."""
    places = {name: f"{UNITS}/{name}" for name in OPTIONAL.values()}
    wanted = {OPTIONAL[door] for door in doors}
    return {
        name: place for name, place in places.items() if name in wanted or (root / place).exists()
    }


def source() -> Path:
    """Where the files are: in the package, or at the top of a checkout."""
    package = Path(latentd.__file__).parent
    inside = package / "systemd"
    return inside if inside.is_dir() else package.parents[1] / "systemd"


def find_faults(program: Path, is_ours: bool, root: Path = Path("/")) -> Iterator[str]:
    """Why the daemon's user could not run a program from within the units: one that lies below
    `root` or on this machine, or our own, whose interpreter and package are looked at too."""
    if not PLAIN.fullmatch(str(program)):
        yield f"{program} is no absolute path that systemd takes as it is; name one with --program"
        return
    needed = [program]
    if is_ours:
        needed += [Path(sys.executable).resolve(), Path(latentd.__file__)]
    for path in needed:
        top = root if (root / path.relative_to("/")).is_file() else Path("/")
        if not (top / path.relative_to("/")).is_file():
            yield f"there is no {path}; name a program that is there with --program"
            continue
        for hidden in HIDDEN:
            if Path(hidden) in path.parents:
                yield f"the units hide {hidden}, where {path} is, from the daemon; {REMEDY}"
        for folder in path.parents:
            if not (top / folder.relative_to("/")).stat().st_mode & 0o001:
                yield f"the user latentd cannot enter {folder}, where {path} is; {REMEDY}"


def put(path: Path, text: str) -> str:
    """Write a file whole or not at all, unless it is there already; returns what was done. Raises
    NotInstalled."""
    try:
        if path.exists() and path.read_text() == text:
            return f"unchanged  {path}"
        done = "replaced " if path.exists() else "installed"
        for folder in reversed([folder for folder in path.parents if not folder.exists()]):
            folder.mkdir()
            folder.chmod(0o755)  # whatever root's umask: the daemon reads them too
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text)
        fresh.chmod(0o644)
        os.replace(fresh, path)
    except OSError as error:
        raise NotInstalled(
            f"cannot write {path}: {error.strerror}; run as root, or install below --root DIR"
        ) from None
    return f"{done}  {path}"
