"""Streams against a daemon, from outside: what run-ahead, many clients and a long prompt cost.

    python tests/bench/bench_streams.py [--device cuda|cpu] [--model v2-lite|demo] [--steps 400]
        [--clients 32] [--prompt 32000] [--rows 512,128,32]

Prints, for one stream, the time from token to token as its client sees it beside the device's own
time and its idle time between steps; the steps per second of one client with many streams and of
as many processes with one each; the time of a single step beside a stream; and the longest time
from token to token while a long prompt comes in beside, by the rows that run between two steps.
Ends with 1 when v2-lite on cuda misses a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from latentd_client import AsyncClient, Client
from timed_streams import CONTEXT, MODELS, prompt, serve, shape, stream, stream_beside

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

IDLE_US = {"p50": 3.0, "p99": 6.0}
"""At most, of the device between two steps of a stream."""
OVER_DEVICE = 1.03
"""At most: the client's time from token to token, over the device's."""
OF_ONE_CLIENT = 0.95
"""At least: the rate of processes with a stream each, over that of one client with all of them."""


def main() -> None:
    """Start a daemon for each number of rows between two steps, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="v2-lite", choices=MODELS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32_000)
    parser.add_argument("--rows", default="0")
    args = parser.parse_args()
    misses: list[str] = []
    context = str(args.prompt + 10 * args.steps)
    for number, rows in enumerate(args.rows.split(",")):
        flags = ["--prefill-rows", rows, "--max-slots", "48", "--max-ctx", context]
        with serve(args.model, args.device, *flags, "--kv-pages", "auto") as endpoint:
            if number == 0:
                misses += measure_one(endpoint, args.steps)
                misses += measure_many(endpoint, args.clients, args.steps)
                measure_steps(endpoint, args.steps)
            measure_beside(endpoint, args.prompt, args.steps, rows)
    print("misses:", misses or "none")
    if misses and (args.model, args.device) == ("v2-lite", "cuda"):
        sys.exit(1)


def measure_one(endpoint: str, steps: int) -> list[str]:
    """One stream: token to token, the device's time, and its idle time. Which limits it missed."""
    with Client(endpoint) as client:
        times = stream(client, steps)
        stats = client.stats()
    device, idle = stats["device_us"]["1"], stats["idle_us"]
    print(f"one stream: token to token us {shape(times)}")
    print(f"    device p50 {device['p50']}, p99 {device['p99']}; idle {idle}")
    over = float(np.median(times)) / device["p50"]
    print(f"    over the device's own time: {(over - 1) * 100:.2f} %")
    misses = [f"idle {name} {idle[name]}" for name in IDLE_US if idle[name] > IDLE_US[name]]
    return misses + [f"{over:.3f} of the device's time"] * (over > OVER_DEVICE)


def measure_many(endpoint: str, clients: int, steps: int) -> list[str]:
    """As many streams in one client as in processes of their own; and steps of all in one request.

    The rate counts steps of the daemon: tokens a second and stream. Which limits were missed."""
    rates = {}
    rates["one client, streams"] = asyncio.run(stream_many(endpoint, clients, steps))
    with Client(endpoint) as client:
        slots = [client.open(prompt(seed)) for seed in range(clients)]
        begin = time.perf_counter()
        for _ in range(steps):
            client.step([(slot, None) for slot in slots])
        rates["one client, steps"] = steps / (time.perf_counter() - begin)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients)
    with context.Pool(clients, keep_barrier, (barrier,)) as pool:
        jobs = [(endpoint, steps, seed) for seed in range(clients)]
        results = pool.starmap(work, jobs, chunksize=1)
    elapsed_s = max(end for _, end, _ in results) - min(begin for begin, _, _ in results)
    rates["processes"] = steps / elapsed_s
    times = [time_us for _, _, times in results for time_us in times]
    print(f"{clients} streams, steps a second: { ({k: round(v, 1) for k, v in rates.items()}) }")
    print(f"    token to token in the processes us {shape(times)}", flush=True)
    share = rates["processes"] / rates["one client, streams"]
    return [f"{share:.3f} of one client's rate"] * (share < OF_ONE_CLIENT)


def measure_steps(endpoint: str, steps: int) -> None:
    """A client that steps, beside a stream of another process."""
    process, ready = start_stream(endpoint, 10)
    ready.wait(60)
    with Client(endpoint) as client, client.open(prompt(1)) as slot:
        times = []
        for _ in range(steps // 4):
            begin = time.perf_counter()
            slot.step()
            times.append((time.perf_counter() - begin) * 1e6)
    process.terminate()
    process.join()
    print(f"single steps beside a stream: us {shape(times)}", flush=True)


def measure_beside(endpoint: str, length: int, steps: int, rows: str) -> None:
    """One stream and seven others, with and without a prompt that comes in."""
    with Client(endpoint) as client, Client(endpoint) as prompting:
        for others in (0, 7):
            beside = [start_stream(endpoint, seed) for seed in range(10, 10 + others)]
            for _, ready in beside:
                ready.wait(60)
            alone = stream(client, steps)
            long_prompt = prompt(100 + others, length)  # that nobody has sent before
            times, took_s, slot = stream_beside(client, partial(prompting.open, long_prompt))
            slot.close()
            for process, _ in beside:
                process.terminate()
                process.join()
            print(f"beside {others} streams, prefill_rows {rows}: token to token us {shape(alone)}")
            print(f"    while {length} prompt tokens come in ({took_s:.2f} s) {shape(times)}")


def start_stream(endpoint: str, seed: int) -> tuple[Any, Any]:
    """A process that streams until it is ended, and the event that says that it does."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=keep_streaming, args=(endpoint, seed, ready), daemon=True)
    process.start()
    return process, ready


def keep_streaming(endpoint: str, seed: int, ready: Any) -> None:
    """Stream for as long as there is room."""
    with Client(endpoint) as client:
        for _ in client.open(prompt(seed)).stream(client.info.max_ctx - CONTEXT):
            ready.set()


async def stream_many(endpoint: str, count: int, steps: int) -> float:
    """Steps a second of many streams in one client."""

    async def read(slot: Any) -> None:
        async for _ in slot.stream(steps):
            pass

    async with AsyncClient(endpoint) as client:
        slots = [await client.open(prompt(seed)) for seed in range(count)]
        begin = time.perf_counter()
        await asyncio.gather(*map(read, slots))
        return steps / (time.perf_counter() - begin)


_barrier: Barrier | None = None


def keep_barrier(barrier: Barrier) -> None:
    """Set up a worker process."""
    global _barrier
    _barrier = barrier


def work(endpoint: str, steps: int, seed: int) -> tuple[float, float, list[float]]:
    """One client with one stream, in a process of its own: begin, end, times in us."""
    assert _barrier is not None
    with Client(endpoint) as client:
        slot = client.open(prompt(seed))
        _barrier.wait(60)
        begin = last = time.monotonic()
        times = []
        for _ in slot.stream(steps):
            now = time.monotonic()
            times.append((now - last) * 1e6)
            last = now
        _barrier.wait(60)
        return begin, last, times


if __name__ == "__main__":
    main()
