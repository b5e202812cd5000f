"""`latentd top`: rates, latencies, slots and pages of a running daemon, live."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from latentd.commands.connecting import add_control, connect_control
from latentd.commands.parsing import Parser, add_command, require_extra
from latentd_client.arguments import seconds

if TYPE_CHECKING:
    import argparse


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "top", "watch a running daemon: rates, latencies, slots and pages", run,
    )  # fmt: skip
    parser.add_argument(
        "--interval-s", type=seconds, default=1.0, metavar="SECONDS",
        help="between two looks; rates and times are of what came between (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", help="print one screen; so when it goes to no terminal"
    )
    add_control(parser)
    parser.set_defaults(timeout_s=5.0)


def run(args: argparse.Namespace) -> int:
    """Look and draw until Ctrl-C."""
    require_extra("top", "rich")
    from latentd import top

    with connect_control(args) as control:
        if args.once or not sys.stdout.isatty():
            top.show_once(control, args.interval_s)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                top.watch(control, args.interval_s)
    return 0
