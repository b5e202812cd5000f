"""`latentd drain`: asks a running daemon to finish its work, perhaps to save it, and waits until it
has left."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.commands.connecting import add_control, connect_control
from latentd.commands.parsing import EXIT_FAILED, Parser, add_command
from latentd.snapshot_files import MANIFEST
from latentd_client import ConnectionLost, DeadlineExceeded, fields
from latentd_client.arguments import in_range

if TYPE_CHECKING:
    import argparse

    from latentd_client import Control

ANSWER_S = 5.0
"""Longest wait for the answer of a daemon on another machine."""
LOOK_S = 1.0
"""Between two looks at a daemon on another machine, and how long it may take to answer."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "drain", "let a running daemon finish its work and leave", run)
    parser.add_argument(
        "--save", type=Path, metavar="DIR",
        help="have all slots and sessions saved there, for a start with --restore DIR",
    )  # fmt: skip
    parser.add_argument(
        "--drain-s", type=in_range(fields.CONTROL_OPS["drain"], "drain_s"), metavar="SECONDS",
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
        if control.is_remote:
            return _drain_remote(control, args)
        daemon = os.pidfd_open(control.health()["pid"])
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


def _drain_remote(control: Control, args: argparse.Namespace) -> int:
    """The same of a daemon that may be on another machine, where nobody sees its process."""
    lost: DeadlineExceeded | None = None
    control.timeout_s = min(args.timeout_s, ANSWER_S)
    try:
        control.drain(args.drain_s, args.save or "")
    except DeadlineExceeded as error:  # who has nothing to do may be gone before his answer is here
        lost = error
    args.timeout_s = LOOK_S
    while (state := _state(args)) is not None:
        if lost is not None and state == "ready":
            raise lost
        time.sleep(LOOK_S)
    print("the daemon does not answer any more: it has left, or has not long to go")
    if args.save is not None:
        print(f"whether it has saved itself at {args.save} is to be seen on its machine")
    return 0


def _state(args: argparse.Namespace) -> str | None:
    """What a daemon says of itself; None when it does not answer."""
    try:
        with connect_control(args) as look:
            return str(look.health()["state"])
    except (ConnectionLost, DeadlineExceeded):
        return None


def _identify(target: Path) -> tuple[int, int] | None:
    """What tells one snapshot from the next."""
    try:
        found = (target / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
