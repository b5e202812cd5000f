"""What the client commands share: the flags to reach a daemon and to sample."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from latentd.config import SETTINGS, Config
from latentd.settings import ConfigError
from latentd_client import Control, Sampling, fields, protocol
from latentd_client.arguments import in_range, seconds
from latentd_client.keys import FILE_VARIABLE, SERVER_VARIABLE

if TYPE_CHECKING:
    from latentd.commands.parsing import Parser
    from latentd.settings import Setting


def add_connection(parser: Parser) -> None:
    """Add --endpoint, --timeout-s, --client-key and --server-key."""
    group = parser.add_argument_group("connection")
    _add_endpoint(
        group,
        SETTINGS["endpoint"],
        "data socket of the daemon; default %(default)s",
        Config.endpoint,
    )
    group.add_argument(
        "--timeout-s", type=seconds, default=60.0, metavar="SECONDS",
        help="how long to wait for a reply (default %(default)s)",
    )  # fmt: skip
    for flag, variable, metavar, about in (
        ("--client-key", FILE_VARIABLE, "FILE", "over tcp with CURVE: the own key pair"),
        ("--server-key", SERVER_VARIABLE, "KEY", "and the daemon's public key"),
    ):
        group.add_argument(
            flag, action=_Variable, const=variable, dest=argparse.SUPPRESS, metavar=metavar,
            help=f"{about} ({variable})",
        )  # fmt: skip


class _Variable(argparse.Action):
    """A flag that stands for an environment variable, of this process and of those it starts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        """Set it."""
        assert isinstance(self.const, str)
        os.environ[self.const] = str(values)


def add_control(parser: Parser) -> None:
    """Add --control-endpoint, beside the flags of `add_connection`."""
    add_connection(parser)
    about = "control socket; default: the one beside --endpoint"
    _add_endpoint(parser, SETTINGS["control_endpoint"], about, None)


def _add_endpoint(
    group: argparse._ActionsContainer, row: Setting, about: str, default: str | None
) -> None:
    """A flag with the names and the check of a setting of the daemon; no file is read."""

    def checked(text: str) -> str:
        try:
            return str(row.check(text, f"flag {row.flag} or {row.variable}"))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group.add_argument(
        row.flag, default=os.environ.get(row.variable, default), type=checked, metavar="ENDPOINT",
        help=f"{about} ({row.variable})",
    )  # fmt: skip


def connect_control(args: argparse.Namespace) -> Control:
    """The control socket that the flags name."""
    endpoint = args.control_endpoint or protocol.control_endpoint(args.endpoint)
    return Control(endpoint, timeout_s=args.timeout_s)


def add_sampling(parser: Parser, temperature: float = 0.0) -> None:
    """Add the sampling flags."""
    group = parser.add_argument_group("sampling")
    about: dict[str, tuple[float | None, str, str]] = {
        "temperature": (temperature, "T", f"0 is greedy (default {temperature})"),
        "top_k": (0, "K", "0 is off"),
        "top_p": (1.0, "P", "1 is off"),
        "min_p": (0.0, "P", "0 is off"),
        "seed": (None, "N", "without it the daemon draws one"),
    }
    for name, (default, metavar, text) in about.items():
        group.add_argument(
            f"--{name.replace('_', '-')}", type=in_range(fields.SAMPLING, name), default=default,
            metavar=metavar, help=text,
        )  # fmt: skip


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling parameters of a command line made with add_sampling."""
    return Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        seed=args.seed,
    )  # fmt: skip


def token_ids(text: str) -> list[int]:
    """Token ids, separated by commas or blanks, for argparse."""
    return [int(_token(part)) for part in text.replace(",", " ").split()]


_token = in_range(fields.OPS["step"], "token")
