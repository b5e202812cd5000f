"""What CURVE costs over tcp: round trips of a small message, as a step's, and of a large one, as
logits, between two processes with nothing else in them.

    python tests/bench/bench_curve.py
"""

from __future__ import annotations

import os
import statistics
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SIZES = {150: 4000, 65536: 1000}
"""Bytes of a message, and round trips of it."""
ROUNDS = 5
"""In turn, so that a busy moment of the machine does not count for one kind only."""


def serve(pipe: Connection, secret: bytes) -> None:
    """Send back what comes, until there is an empty message."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if secret:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
        while (message := router.recv_multipart())[1]:
            router.send_multipart(message)


def round_trips(size: int, is_guarded: bool) -> float:
    """The median in microseconds."""
    (public, secret), own = zmq.curve_keypair(), zmq.curve_keypair()
    context, (ours, theirs) = get_context("spawn"), get_context("spawn").Pipe()
    server = context.Process(target=serve, args=(theirs, secret if is_guarded else b""))
    server.start()
    times = []
    with zmq.Context() as zmq_context, zmq_context.socket(zmq.DEALER) as dealer:
        if is_guarded:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, own[0])
            dealer.setsockopt(zmq.CURVE_SECRETKEY, own[1])
        dealer.connect(f"tcp://127.0.0.1:{ours.recv()}")
        message = os.urandom(size)
        for _ in range(SIZES[size] + 100):
            start = time.perf_counter()
            dealer.send(message)
            dealer.recv()
            times.append(time.perf_counter() - start)
        dealer.send(b"")
        server.join()
    return statistics.median(times[100:]) * 1e6


def main() -> None:
    """Measure and print; the smallest median of the rounds counts."""
    for size in SIZES:
        plain, guarded = (
            [round_trips(size, kind) for _ in range(ROUNDS)] for kind in (False, True)
        )
        print(
            f"{size:>6} bytes each way: {min(plain):.1f} us, with CURVE {min(guarded):.1f} us, "
            f"{min(guarded) - min(plain):+.1f}"
        )


if __name__ == "__main__":
    main()
