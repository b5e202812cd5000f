"""How many guesses of the n-gram drafter are right, and how many steps they spare.

    python tests/bench/bench_drafts.py [--device cuda|cpu] [--steps 256]

The demo model goes on with its own kinds of text, as streams without and with drafts, whose tokens
must be the same. Counts are the daemon's. Greedy text of a small model repeats itself a lot.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from latentd_client import Client, Sampling
from timed_streams import serve

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = (
    b"In the beginning ", b"And it came to pass ", b"And the king said ", b"The book of the ",
    b"To be, or not ", b"Enter the Ghost. ", b"My lord, I will ", b"What is a man, ",
)  # fmt: skip
COUNTED = ("drafted", "accepted", "steps")
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, seed=1),
    "temperature 0.8": Sampling(temperature=0.8, seed=1),
}


def main() -> None:
    """Start a daemon on the demo model and print a line for each way of sampling."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=256)
    args = parser.parse_args()
    with serve("demo", args.device) as endpoint, Client(endpoint) as client:
        for name, sampling in SAMPLINGS.items():
            print(f"{name}: {measure(client, sampling, args.steps)}", flush=True)


def measure(client: Client, sampling: Sampling, steps: int) -> str:
    """All prompts without drafts and with them. Raises AssertionError where the tokens differ."""
    plain, plain_s, _ = counted(client, lambda: texts(client, sampling, steps, None))
    found, took_s, counts = counted(client, lambda: texts(client, sampling, steps, "ngram"))
    assert found == plain
    drafted, accepted, replays = (counts[key] for key in COUNTED)
    return (
        f"{accepted} of {drafted} guesses accepted ({accepted / max(drafted, 1):.0%}), "
        f"{sum(map(len, found))} tokens in {replays} steps, {plain_s:.2f} -> {took_s:.2f} s"
    )


def counted(
    client: Client, run: Callable[[], list[list[int]]]
) -> tuple[list[list[int]], float, dict[str, int]]:
    """What it returns, its seconds, and what the daemon has counted meanwhile."""
    before, begin_s = client.stats(), time.perf_counter()
    found, took_s, after = run(), time.perf_counter() - begin_s, client.stats()
    return found, took_s, {key: after[key] - before[key] for key in COUNTED}


def texts(client: Client, sampling: Sampling, steps: int, draft: str | None) -> list[list[int]]:
    """The tokens that follow each prompt."""
    found = []
    for prompt in PROMPTS:
        with client.open(list(prompt), sampling=sampling) as slot:
            found.append([step.token for step in slot.stream(steps, draft=draft)])
    return found


if __name__ == "__main__":
    main()
