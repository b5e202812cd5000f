"""What a slot that goes out of a daemon, or comes in, costs a stream beside it.

    python tests/bench/bench_transfer.py [--device cuda|cpu] [--model v2-lite|demo]
        [--context 16000] [--pieces 4,16] [--steps 400]

Another process exports a slot and adopts it again, in pieces of so many MiB; printed are the times
from token to token in the meantime, and without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from latentd_client import Client
from timed_streams import MODELS, prompt, serve, shape, stream, stream_beside

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection

    from latentd_client.pages import Piece


def main() -> None:
    """Start a daemon with room for the slot and its copy, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="v2-lite", choices=MODELS)
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--pieces", default="4,16")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    max_ctx = str(args.context + 10 * args.steps)
    with serve(args.model, args.device, "--max-slots", "4", "--max-ctx", max_ctx) as endpoint:
        for mib in map(int, args.pieces.split(",")):
            measure(endpoint, args.context, args.steps, mib << 20)


def measure(endpoint: str, context: int, steps: int, piece_bytes: int) -> None:
    """One slot out and in, in pieces of this size."""
    with mover(endpoint, context, piece_bytes) as pipe, Client(endpoint) as client:
        pipe.recv()
        print(f"alone: token to token us {shape(stream(client, steps))}")
        times, took_s, num_bytes = stream_beside(client, partial(ask, pipe, "export"))
        print(f"{num_bytes / 1e6:.0f} MB in pieces of {piece_bytes >> 20} MiB")
        print(f"    beside export ({took_s:.2f} s): {shape(times)}")
        times, took_s, _ = stream_beside(client, partial(ask, pipe, "adopt"))
        print(f"    beside adopt ({took_s:.2f} s): {shape(times)}", flush=True)


def ask(pipe: Connection, what: str) -> Any:
    """Let the other process do something, and wait for it."""
    pipe.send(what)
    return pipe.recv()


@contextmanager
def mover(endpoint: str, context: int, piece_bytes: int) -> Iterator[Connection]:
    """A process with a slot of `context` tokens, which says when it has it."""
    processes = multiprocessing.get_context("spawn")
    ours, others = processes.Pipe()
    process = processes.Process(target=move, args=(endpoint, context, piece_bytes, others))
    process.start()
    with ours:
        yield ours
    process.join()


def move(endpoint: str, context: int, piece_bytes: int, pipe: Connection) -> None:
    """Export when asked to, tell how many bytes came, then adopt them when asked to."""
    with Client(endpoint) as client, client.open(prompt(1, context)) as slot:
        pipe.send("ready")
        pipe.recv()
        pages = slot.export(piece_bytes=piece_bytes)
        pieces = list(cast("Iterable[Piece]", pages.pieces))
        pipe.send(sum(piece.pages.nbytes for piece in pieces))
        pipe.recv()
        with client.adopt(replace(pages, pieces=pieces)):
            pipe.send("adopted")


if __name__ == "__main__":
    main()
