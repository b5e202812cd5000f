"""Screens for docs/operations.md, from a daemon that has something to do.

    python tests/screens.py --endpoint ipc:///run/latentd/latentd.sock --into docs

Writes what `latentd top` shows (top.svg in colour, top.txt) and what `latentd trace` prints
(trace.txt).
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from latentd import top, tracing
from latentd_client import Control
from latentd_client.protocol import control_endpoint

COLUMNS = 80
FONT = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)
"""Where rich would have a browser load its font from: any other of fixed width does."""


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--into", type=Path, default=Path("docs"))
    args = parser.parse_args()
    print(take(args.endpoint, args.into))


def take(endpoint: str, folder: Path, interval_s: float = 2.0) -> str:
    """Look twice and write; returns the texts."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    with Control(control_endpoint(endpoint)) as control:
        top.show_once(control, interval_s, console)
        stages = "\n".join(tracing.summary(tracing.read(control.trace())))
    svg = console.export_svg(title="latentd top", clear=False, unique_id="top")
    shown = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    for name, text in (("top.svg", FONT.sub("", svg)), ("top.txt", shown), ("trace.txt", stages)):
        (folder / name).write_text(text + "\n")
    return f"{shown}\n{stages}"


if __name__ == "__main__":
    main()
