"""`latentd drain`: asks a running daemon to finish its work, perhaps to save it, and waits until it
has left."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.commands.connecting import add_control, connect_control, positive_float
from latentd.commands.parsing import EXIT_FAILED, Parser, add_command
from latentd.snapshot_files import MANIFEST

if TYPE_CHECKING:
    import argparse


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "drain", "let a running daemon finish its work and leave", run)
    parser.add_argument(
        "--save", type=Path, metavar="DIR",
        help="have all slots and sessions saved there, for a start with --restore DIR",
    )  # fmt: skip
    parser.add_argument(
        "--drain-s", type=positive_float, metavar="SECONDS",
        help="time that running work gets (default: the daemon's own drain_s)",
    )  # fmt: skip
    parser.epilog = (
        "exit codes: 0 the daemon has left (and saved, if asked to), 1 it has not, or nothing was "
        "saved at DIR"
    )
    add_control(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, wait, and look for the snapshot."""
    target = None if args.save is None else args.save.absolute()
    with connect_control(args) as control:
        daemon = os.pidfd_open(control.health()["pid"])  # only who is on its machine may drain it
        before = None if target is None else _identify(target)
        control.drain(args.drain_s, target or "")
    select.select([daemon], [], [])
    if target is None:
        print("the daemon has left")
        return 0
    if _identify(target) in (None, before):
        print(f"the daemon has left, but nothing was saved at {target}; its log says why")
        return EXIT_FAILED
    print(f"the daemon has left, its slots and sessions are saved at {target}")
    return 0


def _identify(target: Path) -> tuple[int, int] | None:
    """What tells one snapshot from the next."""
    try:
        found = (target / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
