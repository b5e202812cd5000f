"""What forks, truncates and hits of the prefix cache cost at a long context, without a socket.

    python tests/bench/bench_sharing.py [--device cuda] [--context 32600] [--forks 62]

Random weights at DeepSeek-V2-Lite's geometry. Times of steps are medians, from admission to event.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd.backend import start_engine
from latentd.extras import NO_EXTRAS
from latentd.model import published
from latentd.operations import SamplingParams, StepRequest
from latentd.options import EngineOptions
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd.engine import Engine
    from latentd.operations import OpenRequest, SlotState

ROUNDS = 9
STEPS = ("plain", "the first of a fork", "the first behind a truncate into a shared page")


def main() -> None:
    """Start, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=32_600)
    parser.add_argument("--forks", type=int, default=62)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(published.DEEPSEEK_V2_LITE))
        options = EngineOptions(
            Path(folder), weights="random", device=args.device, max_ctx=args.context + 100,
            max_slots=args.forks + 2, kv_pages=num_pages(args.context) + 4 * args.forks,
            selftest=False,
        )  # fmt: skip
        engine = start_engine(options, lambda line: None)
    bench = Bench(engine, args.context)
    source = bench.measure_opens()
    bench.warm_up(source, args.forks)
    bench.measure_forks(source, args.forks)
    bench.measure_first_steps(source)
    engine.slots.check()


class Bench:
    """One engine, and slots that are stepped on it."""

    def __init__(self, engine: Engine, context: int) -> None:
        self.engine = engine
        self.context = context

    def measure_opens(self) -> OpenRequest:
        """A long prompt, cold and as hits; the last one stays open."""
        rng = np.random.default_rng(1)
        prompt = rng.integers(0, self.engine.info.vocab_size, self.context).astype(np.int32)
        for what in ("cold", "a hit", "a hit"):
            request, ms = timed(self._open, prompt)
            print(f"open, {what}: {ms:.2f} ms, {request.cached_tokens} tokens cached")
            if what == "cold":
                self.engine.close(request.slot_id, request.epoch)
        return request  # type: ignore[no-any-return]

    def warm_up(self, source: OpenRequest, count: int) -> None:
        """Replay the graph of many forks once: its first replay takes longer."""
        forks = [self._fork(source) for _ in range(count)]
        self._step(forks, self.context)
        for slot in forks:
            self.engine.close(slot.slot_id, slot.epoch)

    def measure_forks(self, source: OpenRequest, count: int) -> None:
        """Many forks of one slot, and their first step, which copies a page for each."""
        forks, ms = timed(lambda: [self._fork(source) for _ in range(count)])
        print(f"{count} forks: {ms / count * 1e3:.0f} us each")
        times = [timed(self._step, forks, self.context + n)[1] for n in range(ROUNDS)]
        print(f"step of all forks: the first {times[0]:.2f} ms, later {np.median(times):.2f} ms")
        for slot in forks:
            self.engine.close(slot.slot_id, slot.epoch)

    def measure_first_steps(self, source: OpenRequest) -> None:
        """Steps of one row: of the source, the first of a fork, behind a truncate."""
        times: dict[str, list[float]] = {what: [] for what in STEPS}
        engine, cut = self.engine, self.context // 2 + 5
        for n in range(ROUNDS):
            times[STEPS[0]].append(timed(self._step, [source], self.context + n)[1])
            fork = engine.fork(source.slot_id, source.epoch, self.context + n + 1, None)
            first = timed(self._step, [fork], self.context + n + 1)[1]
            times[STEPS[1]].append(first)
            engine.truncate(fork.slot_id, fork.epoch, self.context + n + 2, cut)
            times[STEPS[2]].append(timed(self._step, [fork], cut)[1])
            engine.close(fork.slot_id, fork.epoch)
        for what, ms in times.items():
            print(f"step of one row, {what}: {np.median(ms):.3f} ms")

    def _open(self, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> OpenRequest:
        request = self.engine.admit_open(prompt, SamplingParams(), False)
        self._run()
        return request

    def _fork(self, source: OpenRequest) -> SlotState:
        return self.engine.fork(source.slot_id, source.epoch, self.context, None)

    def _step(self, slots: Sequence[OpenRequest | SlotState], pos: int) -> None:
        for slot in slots:
            step = StepRequest(slot.slot_id, slot.epoch, pos, False, NO_EXTRAS)
            self.engine.admit_step(step, 5, None)
        self._run()

    def _run(self) -> None:
        while self.engine.has_work:
            self.engine.run()


def timed(call: Callable[..., Any], *args: object) -> tuple[Any, float]:
    """A call's result and its milliseconds."""
    start_s = time.perf_counter()
    result = call(*args)
    return result, (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
