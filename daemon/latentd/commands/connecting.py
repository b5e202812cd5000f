"""What the client commands share: the flags to reach a daemon and to sample."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from latentd.config import Config
from latentd_client import Sampling

if TYPE_CHECKING:
    from latentd.commands.parsing import Parser


def add_connection(parser: Parser) -> None:
    """Add --endpoint and --timeout-s."""
    group = parser.add_argument_group("connection")
    default = os.environ.get("LATENTD_ENDPOINT", Config.endpoint)
    group.add_argument(
        "--endpoint", default=default, metavar="ENDPOINT",
        help="data socket of the daemon (LATENTD_ENDPOINT; default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--timeout-s", type=positive_float, default=60.0, metavar="SECONDS",
        help="how long to wait for a reply (default %(default)s)",
    )  # fmt: skip


def add_sampling(parser: Parser, temperature: float = 0.0) -> None:
    """Add the sampling flags."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=temperature, metavar="T",
        help="0 is greedy (default %(default)s)",
    )  # fmt: skip
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off")
    group.add_argument(
        "--seed", type=int, default=None, metavar="N", help="without it the daemon draws one"
    )


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling parameters of a command line made with add_sampling."""
    return Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        seed=args.seed,
    )  # fmt: skip


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def token_ids(text: str) -> list[int]:
    """Token ids, separated by commas or blanks, for argparse."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids") from None
    if any(token < 0 for token in ids):
        raise argparse.ArgumentTypeError(f"{text!r} has a negative token id")
    return ids
