"""The entry point: picks the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from latentd.access import AccessError
from latentd.commands import (
    bench,
    check,
    config,
    demo,
    drain,
    generate,
    install_units,
    keygen,
    metrics,
    selftest,
    serve,
    status,
    top,
    trace,
)
from latentd.commands.parsing import EXIT_CONFIG, EXIT_FAILED, Parser
from latentd.endpoint import EndpointError
from latentd.model.fields import CheckpointError
from latentd.options import StartError
from latentd.settings import ConfigError
from latentd.sources import refuse_unknown
from latentd_client import LatentdError, __version__
from latentd_kernels.manifest import ManifestError

if TYPE_CHECKING:
    from collections.abc import Sequence

LOST_OUTPUT = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Why a line could not be printed: the reader has gone (which is no news), or a full disk."""
COMMANDS = (
    serve, demo, generate, check, config, selftest, status, top, metrics, trace, drain, keygen,
    install_units, bench,
)  # fmt: skip
"""In the order of the help."""
BAD_CONFIGURATION = (
    AccessError,
    CheckpointError,
    ConfigError,
    EndpointError,
    ManifestError,
    StartError,
)
"""What a restart does not cure: exit code 78."""


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="latentd",
        description="Low-latency decode daemon for latent-attention models.",
        epilog="exit codes: 0 clean, 1 failed, 2 bad usage (78 of serve, demo, check, config, "
        "selftest), 70 device error and 74 not saved (of serve), 78 bad configuration",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"latentd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    _fill_closed_streams()
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    prog = args.parser.prog
    try:
        refuse_unknown(os.environ, prog.rpartition(" ")[2])
    except ConfigError as error:
        return _fail(prog, error, args.parser.usage_code)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BAD_CONFIGURATION as error:
        return _fail(prog, error, EXIT_CONFIG)
    except LatentdError as error:
        return _fail(prog, error, EXIT_FAILED)
    except OSError as error:
        if error.errno not in LOST_OUTPUT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit stays quiet
        return EXIT_FAILED if error.errno == errno.EPIPE else _fail(prog, error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


def _fill_closed_streams() -> None:
    """Python has None for a stream whose descriptor was closed (`>&-`): nothing comes from it,
    nobody reads it, and no socket shall get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end


def _fail(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
