"""What the benchmarks of a running daemon share: the flags of their cases, and the report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from latentd.commands.connecting import add_connection
from latentd_client import __version__
from latentd_client.arguments import seconds, up_to, whole
from latentd_kernels.geometry import MAX_CTX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import DataclassInstance

    from latentd.commands.parsing import Parser
    from latentd_client import DaemonInfo

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Slots in a request, as far as the daemon has them."""


def add_case_flags(parser: Parser, steps: int, what: str) -> None:
    """Add --steps (of `what` each case has so many), --seconds, --context, --json and those of
    `add_connection`."""
    parser.add_argument(
        "--steps", type=whole, default=steps, metavar="N",
        help=f"{what} of each case (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=seconds, default=10.0, metavar="S",
        help="end a case after this time (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=up_to(MAX_CTX), default=16, metavar="N",
        help="tokens in each slot at the start (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_connection(parser)


def print_json(info: DaemonInfo, context: int, results: Iterable[DataclassInstance]) -> None:
    """Print all cases with the facts of their daemon, when the last one is done."""
    names = ("model", "device", "dtype", "numerics", "max_ctx", "max_slots")
    facts = {name: getattr(info, name) for name in names}
    cases = [asdict(result) for result in results]
    report = {"latentd": __version__, "daemon": facts, "context": context, "cases": cases}
    json.dump(report, sys.stdout, indent=2)
    print()
