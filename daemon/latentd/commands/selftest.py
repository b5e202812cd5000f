"""`latentd selftest`: the promises of equal bits, tried on this device and checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from latentd.commands.parsing import (
    EXIT_CONFIG,
    EXIT_FAILED,
    Parser,
    add_command,
    add_settings,
    read_config,
    require_daemon,
)

if TYPE_CHECKING:
    import argparse


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "selftest", "check on your device and checkpoint: graph = eager, pages "
        "permuted, a row alone = the row in a batch, a stream = steps", run, EXIT_CONFIG,
    )  # fmt: skip
    add_settings(parser, ("model", "engine", "memory"))


def run(args: argparse.Namespace) -> int:
    """Load, test, print the report; exit code 1 on a mismatch."""
    options = read_config(args).engine_options()
    require_daemon("selftest")
    from latentd.backend import start_engine  # these need torch
    from latentd.leaving import leaving_on_device_fault
    from latentd.selftest import run_selftest

    with leaving_on_device_fault():
        # The start's own test would raise; here the report is wanted, of what is computed.
        options = replace(options, selftest=False, prefix_cache=False)
        engine = start_engine(options, lambda text: print(text, flush=True))
        report = run_selftest(engine)
    print("\n".join((*report.lines, f"self-test on {engine.info.device} {report.verdict}")))
    return EXIT_FAILED if report.failures else 0
