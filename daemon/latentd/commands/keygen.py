"""`latentd keygen`: makes the key pair of a daemon or a client for tcp with CURVE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.commands.parsing import Parser, add_command
from latentd_client.keys import read_pair, write_pair

if TYPE_CHECKING:
    import argparse


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    about = "write a new key pair for encrypted tcp to FILE and print its public key"
    parser = add_command(subparsers, "keygen", about, run)
    parser.add_argument(
        "file", metavar="FILE", help="a new file; only its owner can read it, none is written over"
    )
    parser.add_argument(
        "--public", action="store_true",
        help="print the public key of the pair in FILE, and write nothing",
    )  # fmt: skip
    parser.epilog = (
        "A daemon names its file with curve_key, a client its own with LATENTD_CLIENT_KEY. The "
        "daemon's public key is the clients' LATENTD_SERVER_KEY; a client's is a line of the "
        "daemon's curve_clients."
    )


def run(args: argparse.Namespace) -> int:
    """Print the public key, of a new pair or of the one that is there. Raises KeyFault."""
    print((read_pair if args.public else write_pair)(args.file).public)
    return 0
