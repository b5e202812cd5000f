"""How long it takes to save slots and to restore them, without a socket.

    python tests/bench/bench_saving.py [--device cuda] [--slots 4] [--context 16000] [--folder DIR]

Random weights at DeepSeek-V2-Lite's widths, four layers. The snapshot is written to DIR, by default
one for temporary files; it is read again while the system still has it in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import saving_promises
import scenarios
from latentd import snapshot
from latentd.backend import start_engine
from latentd.model import published
from latentd.options import EngineOptions
from latentd.sessions import Sessions
from latentd_kernels.geometry import num_pages


def main() -> None:
    """Start two engines, hand slots from one to the other, print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        config = published.DEEPSEEK_V2_LITE | {"num_hidden_layers": 4}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = EngineOptions(
            Path(folder), weights="random", device=args.device, max_ctx=args.context + 100,
            max_slots=args.slots, kv_pages=args.slots * num_pages(args.context + 100),
            selftest=False,
        )  # fmt: skip
        source, target = (start_engine(options, lambda line: None) for _ in range(2))
        prompts = [scenarios.draw_tokens(args.context, seed) for seed in range(args.slots)]
        sessions = saving_promises.own([scenarios.open_slot(source, ids) for ids in prompts])
        begin = time.perf_counter()
        held = snapshot.save(source, sessions, Path(folder) / "saved")
        middle = time.perf_counter()
        snapshot.restore(target, Sessions(60, 60), Path(folder) / "saved")
        end = time.perf_counter()
    print(f"{held}: saved in {middle - begin:.2f} s, restored in {end - middle:.2f} s")


if __name__ == "__main__":
    main()
