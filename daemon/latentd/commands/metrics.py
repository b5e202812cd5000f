"""`latentd metrics`: serves a daemon's figures to Prometheus, from a process of its own."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from latentd.commands.connecting import add_control, connect_control
from latentd.commands.parsing import Parser, add_command, require_extra
from latentd.settings import ConfigError
from latentd_client.arguments import refusal
from latentd_client.protocol import MAX_PORT, is_port

if TYPE_CHECKING:
    import argparse

    from latentd_client import Control
    from latentd_client.protocol import Header

DEFAULT = "127.0.0.1:9464"
ENDS = {signal.SIGINT, signal.SIGTERM}


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "metrics", "serve a running daemon's figures to Prometheus", run
    )
    parser.add_argument(
        "--listen", type=_address, default=DEFAULT, metavar="HOST:PORT",
        help="where to answer GET /metrics (default %(default)s); it asks nobody who they are",
    )  # fmt: skip
    add_control(parser)
    parser.set_defaults(timeout_s=5.0)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; a daemon that does not run, or not yet, is `latentd_up 0`."""
    require_extra("metrics", "prometheus_client")
    from latentd.metrics import listen

    host, port = args.listen
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # before threads are made
    try:
        server = listen(host, port, Source(args).ask)
    except OSError as error:
        raise ConfigError(f"--listen {host}:{port}: {error.strerror}") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"serving metrics at http://{shown}:{server.server_port}/metrics", flush=True)
    signal.sigwait(ENDS)
    server.shutdown()
    return 0


class Source:
    """A daemon that may come and go."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._control: Control | None = None

    def ask(self) -> tuple[Header, Header]:
        """Its health and stats. Raises LatentdError."""
        if self._control is None:
            self._control = connect_control(self._args)
        return self._control.health(), self._control.stats()


def _address(text: str) -> tuple[str, int]:
    """A host and a port, for argparse."""
    host, _, number = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not is_port(number):
        raise refusal(text, f"HOST:PORT with a port of 0 to {MAX_PORT}")
    return host, int(number)
