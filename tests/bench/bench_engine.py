"""What the engine adds to the device's own time: admit to event, by rows; and streams.

    python tests/bench/bench_engine.py [--model DIR] [--device cuda|cpu] [--steps 2000]

Without --model, random weights on the demo model's config. Prints the start-up report and a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from latentd.backend import start_engine
from latentd.extras import NO_EXTRAS
from latentd.operations import SamplingParams, StepRequest, StreamRequest
from latentd.options import EngineOptions

if TYPE_CHECKING:
    from latentd.engine import Engine
    from latentd.operations import OpenRequest


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--max-ctx", type=int, default=4096)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from latentd.demo.architecture import CONFIG

            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        options = EngineOptions(
            args.model or Path(folder),
            weights="checkpoint" if args.model else "random",
            device=args.device,
            max_ctx=args.max_ctx,
        )
        begin_s = time.perf_counter()
        engine = start_engine(options, print)
    print(f"ready in {time.perf_counter() - begin_s:.2f} s; {engine.startup}")
    sys.setswitchinterval(1e-4)
    gc.collect()
    gc.freeze()
    print("rows  device p50  admit to event p50   p99  engine's own p50  (us)")
    for rows in (1, 2, 8, 16, 64):
        measure(engine, rows, args.steps)
    measure_stream(engine, args.steps)


def measure(engine: Engine, rows: int, steps: int) -> None:
    """Steps of `rows` slots in one launch."""
    slots = [open_slot(engine, seed) for seed in range(rows)]
    engine.reset_stats()
    times = []
    for pos in range(100, 100 + steps):
        start_s = time.perf_counter()
        for slot in slots:
            engine.admit_step(StepRequest(slot.slot_id, slot.epoch, pos, False, NO_EXTRAS), 5, None)
        engine.run()
        times.append((time.perf_counter() - start_s) * 1e6)
    close(engine, slots)
    p50, p99 = np.percentile(times, (50, 99))
    ((_, device),) = engine.stats()["device_us"].items()
    own = p50 - device["p50"]
    print(f"{rows:4} {device['p50']:11.1f} {p50:19.1f} {p99:6.1f} {own:17.1f}")


def measure_stream(engine: Engine, steps: int) -> None:
    """One stream that runs ahead: time from token to token."""
    slot = open_slot(engine, 0)
    engine.reset_stats()
    request = StreamRequest(slot.slot_id, slot.epoch, 100, steps, frozenset(), steps)
    engine.admit_stream(request, None, None)
    times = []
    last_s = time.perf_counter()
    while engine.has_work:
        engine.run()
        now_s = time.perf_counter()
        times.append((now_s - last_s) * 1e6)
        last_s = now_s
    close(engine, [slot])
    p50, p99 = np.percentile(times, (50, 99))
    device = engine.stats()["device_us"]["1"]["p50"]
    print(f"stream: device p50 {device:.1f}, token to token p50 {p50:.1f}, p99 {p99:.1f} us")


def open_slot(engine: Engine, seed: int) -> OpenRequest:
    """A slot with 100 tokens."""
    prompt = np.random.default_rng(seed).integers(0, engine.info.vocab_size, 100)
    request = engine.admit_open(prompt.astype(np.int32), SamplingParams(), False)
    while engine.has_work:
        engine.run()
    return request


def close(engine: Engine, slots: list[OpenRequest]) -> None:
    """Free the slots."""
    for slot in slots:
        engine.close(slot.slot_id, slot.epoch)


if __name__ == "__main__":
    main()
