"""A whole daemon, measured from outside: seconds to READY, then `latentd bench steps` and `attend`.

    python tests/bench/bench_daemon.py [--device cuda|cpu] [--steps 512] [--only demo,v2-lite,glm]

The demo model runs with its own weights and is started twice, so that the second start finds warm
file caches. The large geometries run with random weights made on the device, from their published
configs: the times of a step do not depend on what the weights say (the experts chosen do spread).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from latentd import demo
from latentd.commands.child import Child
from latentd.model.published import DEEPSEEK_V2_LITE, GLM_4_7_FLASH

CONFIGS = {"v2-lite": DEEPSEEK_V2_LITE, "glm": GLM_4_7_FLASH}
READY_S = 400.0


def main() -> None:
    """Start each model's daemon and print what it says and what the benchmark measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", default="512")
    parser.add_argument("--context", default="64")
    parser.add_argument("--only", default="demo,v2-lite")
    args = parser.parse_args()
    for name in args.only.split(","):
        if name == "demo":
            flags = ["--model", str(demo.model_dir()), "--device", args.device]
            measure("demo, first start", flags, None)
            measure("demo", flags, args)
        else:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
                flags = ["--weights", "random", "--config", folder, "--name", name]
                measure(name, [*flags, "--device", args.device], args)


def measure(name: str, flags: list[str], args: argparse.Namespace | None) -> None:
    """One start; with `args`, also the benchmark and the daemon's own summary."""
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        with Child(Path(folder), flags) as child:
            try:
                child.wait_ready(READY_S, lambda status: None)
            finally:
                if args is not None or child.process.poll() is not None:
                    print(child.log.read_text(errors="replace"))
            print(f"{name}: READY after {time.monotonic() - begin_s:.1f} s", flush=True)
            if args is not None:
                usual = ["--endpoint", child.endpoint, "--steps", args.steps]
                usual += ["--context", args.context]
                for part in ("steps",), ("attend", "--rows", "1", "--rows", "8", "--rows", "64"):
                    command = [sys.executable, "-m", "latentd", "bench", *part, *usual]
                    subprocess.run(command, check=True)
            print(flush=True)


if __name__ == "__main__":
    main()
