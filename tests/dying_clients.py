"""Clients that open a slot, take three steps and are killed, one after the other.

    python tests/dying_clients.py ENDPOINT ROUNDS

Every other one is killed while it reads a stream, and has a fork. They are forked from this
process, which has imported all they need: a round takes milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from latentd_client import Client, RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def main() -> None:
    """Let clients live and die."""
    endpoint, rounds = sys.argv[1], int(sys.argv[2])
    for number in range(rounds):
        is_alive, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                live(endpoint, number, tell)
            finally:
                os._exit(1)
        os.close(tell)
        heard = os.read(is_alive, 1)
        os.close(is_alive)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if heard != b"x" or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"client {number} died by itself")


def live(endpoint: str, number: int, tell: int) -> None:
    """Work until it is time to die."""
    client = Client(endpoint)
    slot = patiently(lambda: client.open([number % 256] * (1 + number % 200)))
    for _ in range(3):
        slot.step()
    if number % 2:
        fork = patiently(slot.fork)
        next(fork.stream(1000, credit=8))
    os.write(tell, b"x")
    time.sleep(60)


def patiently(call: Callable[[], T]) -> T:
    """Wait for a slot of the dead."""
    while True:
        try:
            return call()
        except RequestRejected as refusal:
            if refusal.code != "no_slot":
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
