"""`latentd-openai`: serves OpenAI's HTTP interface, as a client of a running daemon."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd_client import DEFAULT_ENDPOINT, LatentdError, __version__
from latentd_client.arguments import seconds, tcp_port
from latentd_client.variables import OF_CLIENTS, find_slip
from latentd_openai.access import is_loopback
from latentd_openai.door import Door, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP_S: Final = 30
"""How long running requests may go on after a signal to stop."""
IDLE_S: Final = 75
"""How long a connection may wait for its next request: longer than those who keep one wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if (slip := find_slip(os.environ, "openai", "latentd-openai --help")) is not None:
        parser.error(slip)
    key = _key(parser, args.api_key_file)
    if key is None and not is_loopback(args.host):
        parser.error(f"--host {args.host} can be reached from other machines: give --api-key-file")
    settings = Settings(
        args.endpoint, args.timeout_s, args.tokenizer, args.chat_template, args.model_name
    )
    try:
        return asyncio.run(_serve(settings, args.host, args.port, key))
    except ImportError as error:
        text = "takes packages that are missing: pip install '.[openai]' from a checkout, or with "
        text += f"the path of a wheel in place of the dot ({error})"
        print(f"{parser.prog}: {text}", file=sys.stderr)
    except (LatentdError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
    return 1


async def _serve(settings: Settings, host: str, port: int, key: str | None) -> int:
    import uvicorn

    from latentd_openai.app import application
    from latentd_openai.connections import BACKLOG, BoundedProtocol, make_room

    make_room()
    door = Door(settings)
    try:
        served = await door.served()  # a wrong setting ends it here
        is_v6 = ":" in host
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        with socket.create_server((host, port), family=family) as listening:
            where = f"[{host}]" if is_v6 else host
            port = listening.getsockname()[1]
            print(f"{served.name}: serving at http://{where}:{port}/v1", flush=True)
            config = uvicorn.Config(
                application(door, key), http=BoundedProtocol, ws="none", lifespan="off",
                log_level="warning", backlog=BACKLOG, server_header=False,
                timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=STOP_S,
            )  # fmt: skip
            for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at its end
                signal.signal(number, signal.SIG_IGN)
            await uvicorn.Server(config).serve([listening])
        return 0
    finally:
        await door.close()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser("latentd-openai", description=__doc__, allow_abbrev=False)
    parser.epilog = f"Variables of the environment: {', '.join(OF_CLIENTS)}."
    parser.add_argument("--version", action="version", version=f"latentd-openai {__version__}")
    parser.add_argument(
        "--endpoint", metavar="ENDPOINT",
        help=f"data socket of the daemon (LATENTD_ENDPOINT; default {DEFAULT_ENDPOINT})",
    )  # fmt: skip
    parser.add_argument(
        "--timeout-s", type=seconds, default=60.0, metavar="SECONDS",
        help="how long the daemon may take for a prompt or a token (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="the model's tokenizer.json, or its folder; without it bytes, as the demo has them",
    )  # fmt: skip
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE",
        help="a jinja template, in place of the one beside the tokenizer",
    )  # fmt: skip
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients ask for (default: as the daemon has it)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default %(default)s)")
    parser.add_argument(
        "--port", type=tcp_port, default=8000, help="0 takes a free one (default %(default)s)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="a file with the key that clients must send; needed where --host is not loopback",
    )  # fmt: skip
    return parser


def _key(parser: argparse.ArgumentParser, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeError) as error:
        parser.error(f"cannot read {path}: {error}")
    if not key:
        parser.error(f"{path} is empty, must hold a key")
    return key


if __name__ == "__main__":
    sys.exit(main())
