"""Random operations on the fake engine for as long as you like; `make soak`.

    python tests/soak.py [--seconds 3600] [--seed N]

Every 10,000 operations a new engine starts; in between it is saved and restored. After each
operation the pages are counted and every token is compared with the plain record of its slot; a
failure names the seed that repeats it.
Each seed also makes a client's storm of 500 steps, calm and with every second reply lost, and a
crowd of clients who wait for each other's pages.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter

import crowd
import storm
from fakes import FakeEngine
from random_clients import NAMES, Clients, check, finish
from random_restarts import restart

OPERATIONS_EACH = 10_000
"""Of one engine."""
LIVES = 5
"""Of one engine: it is saved and restored at the end of each."""
STORM_STEPS = 500
TEXTS = 15
"""Of each client of a crowd."""
TALLIED = ("opens", "forks", "tokens", "prefix_hits", "kv_pages_evicted", "copies", "slots_adopted",
           "attend_rows", "accepted")  # fmt: skip
COUNTED = (*TALLIED, "restored")
WEIGHTS = {"run": 5, "step": 3, "open": 3, "stream": 2, "fork": 2, "attend": 2,
           "export": 2, "adopt": 2}  # fmt: skip
"""How often an operation is drawn; the others once."""


def main() -> None:
    """Soak until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end, seed = time.monotonic() + args.seconds, args.seed
    total: Counter[str] = Counter()
    while time.monotonic() < end:
        print(f"seed {seed}", end="\r", flush=True)
        total += soak(seed, OPERATIONS_EACH)
        total["replies_lost"] += weather(seed, STORM_STEPS)
        total += crowded(seed, TEXTS)
        seed += 1
    print(f"{(seed - args.seed) * OPERATIONS_EACH} operations: {dict(total)}")


def soak(seed: int, operations: int) -> Counter[str]:
    """Random operations on one engine, which is saved and restored; how often the rarer things
    happened."""
    draw = random.Random(seed)
    pages = draw.randint(5, 18)
    clients = Clients(start(draw, pages))
    weights = [WEIGHTS.get(name, 1) for name in NAMES]
    total: Counter[str] = Counter()
    for _ in range(LIVES):
        for name in draw.choices(NAMES, weights, k=operations // LIVES):
            clients.act(name, draw.randrange(4), draw.randrange(400))
            check(clients.engine)
        total += tally(clients.engine)
        total["restored"] += len(clients.live) + len(clients.attenders.live)
        restart(clients, start(draw, pages))
        check(clients.engine)
    finish(clients)
    return total


def start(draw: random.Random, pages: int) -> FakeEngine:
    """An engine with random settings."""
    engine = FakeEngine(
        max_ctx=280, max_slots=5, buckets=(1, 2, 4, 5), pages=pages,
        prefill_chunk=draw.choice((1, 16, 64, 100)), prefill_rows=draw.choice((0, 7)),
        cache=draw.random() < 0.8,
    )  # fmt: skip
    engine.fake.is_fast = draw.random() < 0.3
    return engine


def tally(engine: FakeEngine) -> Counter[str]:
    """How often the rarer things happened in an engine."""
    stats = engine.stats() | {"copies": engine.fake.copies}
    return Counter({name: int(str(stats[name])) for name in TALLIED})


def weather(seed: int, steps: int) -> int:
    """A storm that ends like a calm day; how many replies were lost."""
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
        lost, texts = storm.run(f"ipc://{folder}/s", seed, steps, 0.5)
        assert (0, texts) == storm.run(f"ipc://{folder}/s", seed, steps, 0.0)
    return lost


def crowded(seed: int, texts: int) -> Counter[str]:
    """Clients who wait for each other's pages; what happened to them."""
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
        happened = crowd.run(f"ipc://{folder}/s", seed, texts, cache=seed % 2 == 0)
    return Counter({f"crowd_{name}": count for name, count in happened.items()})


if __name__ == "__main__":
    main()
