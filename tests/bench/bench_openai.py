"""latentd-openai beside the daemon's own client: the time to the first token, and tokens a second.

    python tests/bench/bench_openai.py [--device cuda|cpu] [--model v2-lite|demo] [--steps 400]
        [--streams 1,8,32]

Both decode the same random prompts of 100 tokens. The reader of HTTP only looks for events and
parses none: what is measured is the door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from doors import door_before
from latentd_client import AsyncClient
from timed_streams import CONTEXT, MODELS, prompt, serve
from tokenizing import words

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Read = Callable[[int, int], Awaitable[tuple[float, float, int]]]

FIRSTS = 20
"""Requests, one after the other, of which the times to the first token are taken."""


def main() -> None:
    """Start a daemon and a door, and measure through both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="v2-lite", choices=MODELS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--streams", default="1,8,32")
    args = parser.parse_args()
    streams = [int(count) for count in args.streams.split(",")]
    context = str(CONTEXT + args.steps + 1)
    flags = ["--max-slots", str(max(streams)), "--max-ctx", context, "--kv-pages", "auto"]
    with tempfile.TemporaryDirectory() as folder, serve(args.model, args.device, *flags) as at:
        own = []
        if args.model != "demo":
            words(102_400).save(f"{folder}/tokenizer.json")
            own = ["--tokenizer", folder]
        with door_before(at, *own) as url:
            asyncio.run(measure(at, url, args.steps, streams))


async def measure(at: str, url: str, steps: int, streams: list[int]) -> None:
    """Both ways in turn. First tokens are of prompts that are new; of streams the second time
    counts, with prompts that the daemon has in its cache."""
    async with AsyncClient(at) as client:
        readers: dict[str, Read] = {
            "client": lambda seed, steps: read_direct(client, seed, steps),
            "door": lambda seed, steps: read_door(url, client.info.model, seed, steps),
        }
        for number, (way, read) in enumerate(readers.items(), 1):
            await read(0, 10)
            firsts = [(await read(1000 * number + i, 2))[0] * 1e3 for i in range(FIRSTS)]
            p50, p99 = np.percentile(firsts, (50, 99))
            print(f"{way}: first token after {p50:.2f} ms (p99 {p99:.2f})")
        for count in streams:
            for way, read in readers.items():
                for _ in range(2):
                    rate, events = await side_by_side(read, count, steps)
                print(f"{way}: {count} streams {rate:.0f} tokens/s, {events:.2f} tokens an event")


async def side_by_side(read: Read, count: int, steps: int) -> tuple[float, float]:
    """Tokens per second of several streams together, and tokens for each thing that came."""
    start = time.perf_counter()
    done = await asyncio.gather(*(read(seed, steps) for seed in range(count)))
    took = time.perf_counter() - start
    return count * steps / took, count * steps / sum(events for _, _, events in done)


async def read_direct(client: AsyncClient, seed: int, steps: int) -> tuple[float, float, int]:
    """A text through the daemon's client: seconds to the first token and to the last, and how many
    times something came."""
    start, events = time.perf_counter(), 1
    async with await client.open(prompt(seed)) as slot:
        first = time.perf_counter() - start
        async for _ in slot.stream(steps - 1):
            events += 1
    return first, time.perf_counter() - start, events


async def read_door(url: str, model: str, seed: int, steps: int) -> tuple[float, float, int]:
    """The same through the door."""
    at = urlsplit(url)
    fields: dict[str, Any] = {
        "model": model, "prompt": prompt(seed).tolist(), "max_tokens": steps, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(fields).encode()
    start, first, events, last = time.perf_counter(), 0.0, 0, b""
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST {at.path}/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    kind = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + kind).encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            events, last = events + 1, line
    writer.close()
    assert last, "it was refused"
    tokens = json.loads(last[len("data: ") :])["usage"]["completion_tokens"]
    assert tokens == steps, f"a text has ended after {tokens} tokens"
    return first, time.perf_counter() - start, events


if __name__ == "__main__":
    main()
