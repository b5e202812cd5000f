"""Streams against a daemon, from outside: what run-ahead, many clients and a long prompt cost.

    python tests/bench/bench_streams.py [--device cuda|cpu] [--model v2-lite|demo] [--steps 400]
        [--clients 32] [--prompt 32000] [--rows 512,128,32]

Prints, for one stream, the time from token to token as its client sees it beside the device's own
time and its idle time between steps; the steps per second of one client with many streams and of
as many processes with one each; the time of a single step beside a stream; and the longest time
from token to token while a long prompt comes in beside, by the rows that run between two steps.
v2-lite has random weights made on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd import demo
from latentd.commands.child import Child
from latentd.model.published import DEEPSEEK_V2_LITE
from latentd_client import AsyncClient, Client

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.synchronize import Barrier

READY_S = 400.0
CONTEXT = 100
"""Tokens in a slot before its stream."""


def main() -> None:
    """Start a daemon for each number of rows between two steps, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="v2-lite", choices=("v2-lite", "demo"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32_000)
    parser.add_argument("--rows", default="0")
    args = parser.parse_args()
    for number, rows in enumerate(args.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--device", args.device, "--prefill-rows", rows, "--max-slots", "48"]
            flags += ["--max-ctx", str(args.prompt + 10 * args.steps), "--kv-pages", "auto"]
            if args.model == "demo":
                flags += ["--model", str(demo.model_dir())]
            else:
                (Path(folder) / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
                flags += ["--weights", "random", "--config", folder, "--name", args.model]
            with Child(Path(folder), flags) as child:
                try:
                    child.wait_ready(READY_S, lambda status: None)
                except BaseException:
                    print(child.log.read_text(errors="replace"))
                    raise
                if number == 0:
                    measure_one(child.endpoint, args.steps)
                    measure_many(child.endpoint, args.clients, args.steps)
                    measure_steps(child.endpoint, args.steps)
                measure_beside(child.endpoint, args.prompt, args.steps, rows)


def measure_one(endpoint: str, steps: int) -> None:
    """One stream: token to token, the device's time, and its idle time."""
    with Client(endpoint) as client:
        times = stream(client, steps)
        stats = client.stats()
    device, idle = stats["device_us"]["1"], stats["idle_us"]
    print(f"one stream: token to token us {shape(times)}")
    print(f"    device p50 {device['p50']}, p99 {device['p99']}; idle {idle}")
    print(f"    over the device's own time: {(np.median(times) / device['p50'] - 1) * 100:.2f} %")


def measure_many(endpoint: str, clients: int, steps: int) -> None:
    """As many streams in one client as in processes of their own; and steps of all in one request.

    The rate counts steps of the daemon: tokens a second and stream."""
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
            done = threading.Event()
            took: list[float] = []
            thread = threading.Thread(
                target=enter, args=(prompting, 100 + others, length, done, took)
            )
            beside_prompt = stream(client, 100_000, thread, done)
            thread.join()
            for process, _ in beside:
                process.terminate()
                process.join()
            print(f"beside {others} streams, prefill_rows {rows}: token to token us {shape(alone)}")
            came = f"while {length} prompt tokens come in ({took[0]:.2f} s)"
            print(f"    {came} {shape(beside_prompt)}", flush=True)


def stream(
    client: Client, steps: int, beside: threading.Thread | None = None,
    done: threading.Event | None = None,
) -> list[float]:  # fmt: skip
    """Times from token to token in us, of `steps` tokens or until `done`; `beside` is started when
    the stream runs."""
    slot = client.open(prompt(0))
    tokens = slot.stream(min(steps, client.info.max_ctx - CONTEXT))
    for _ in range(10):
        next(tokens)
    if beside is not None:
        beside.start()
    times, last = [], time.perf_counter()
    for _ in tokens:
        now = time.perf_counter()
        times.append((now - last) * 1e6)
        last = now
        if done is not None and done.is_set():
            break
    slot.close()
    return times


def enter(client: Client, seed: int, length: int, done: threading.Event, took: list[float]) -> None:
    """Open a slot with a long prompt that nobody has sent before, and close it."""
    begin = time.perf_counter()
    slot = client.open(prompt(seed, length))
    took.append(time.perf_counter() - begin)
    done.set()
    slot.close()


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


def prompt(seed: int, length: int = CONTEXT) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids from a seed; every model here has 256 at least."""
    return np.random.default_rng(seed).integers(1, 256, length).astype(np.int32)


def shape(times: Sequence[float]) -> str:
    """Percentiles of times."""
    p50, p99, worst = np.percentile(times, (50, 99, 100))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f} ({len(times)})"


if __name__ == "__main__":
    main()
