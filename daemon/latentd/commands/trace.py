"""`latentd trace`: where the time of a daemon's last launches went."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from latentd import tracing
from latentd.commands.connecting import add_control, connect_control
from latentd.commands.parsing import EXIT_FAILED, Parser, add_command
from latentd_client.arguments import up_to
from latentd_client.fields import MAX_TRACED

if TYPE_CHECKING:
    import argparse


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "trace", "write the last launches of a running daemon for Perfetto", run
    )
    parser.add_argument(
        "--output", type=Path, default=Path("latentd-trace.json"), metavar="FILE",
        help="for ui.perfetto.dev or chrome://tracing (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--last", type=up_to(MAX_TRACED), metavar="N",
        help=f"only so many launches (default: all that it remembers, {MAX_TRACED} at most)",
    )  # fmt: skip
    add_control(parser)


def run(args: argparse.Namespace) -> int:
    """Ask once, write the file and print medians of the stages."""
    with connect_control(args) as control:
        traced = tracing.read(control.trace(args.last))
    if not traced:
        return _fail(args, "the daemon has not launched anything yet; nothing is written")
    try:
        args.output.write_text(json.dumps(tracing.chrome(traced)))
    except OSError as error:
        return _fail(args, f"cannot write {args.output}: {error.strerror}")
    print("\n".join(tracing.summary(traced)))
    print(f"{len(traced)} launches written to {args.output}")
    return 0


def _fail(args: argparse.Namespace, text: str) -> int:
    print(f"{args.parser.prog}: {text}", file=sys.stderr)
    return EXIT_FAILED
