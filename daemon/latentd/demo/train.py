"""Trains the bundled demo model: `python -m latentd.demo.train --out FOLDER`.

Fetches the text (corpus.py), trains the network (network.py, trainer.py) for a given time, writes
the best checkpoint (export.py) and report.json. Needs torch, safetensors and, unless the archives
are already in --sources, pip.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from latentd.demo import corpus, export
from latentd.demo.network import Network
from latentd.demo.trainer import Options, Trainer
from latentd.demo.windows import VALIDATION_CONTEXT, Sampler, Validation


def expert_loads(network: Network, text: bytes, device: torch.device) -> list[list[float]]:
    """Share of the choices of each expert of each MoE layer over 64 windows of `text`."""
    inputs, targets = Sampler(text, device, 0).draw(64, VALIDATION_CONTEXT)
    network.eval()
    with torch.no_grad():
        loads = network(inputs, targets)[1]
    return [[round(x, 3) for x in row] for row in loads.tolist()]


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, write the checkpoint and report.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--sources", type=Path, help="folder of the fetched archives")
    for name, value in asdict(Options()).items():
        kind = (
            {"action": argparse.BooleanOptionalAction}
            if name == "compile"
            else {"type": type(value)}
        )
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, **kind)
    arguments = vars(parser.parse_args(argv))
    out, sources = arguments.pop("out"), arguments.pop("sources")
    options = Options(**arguments)
    with tempfile.TemporaryDirectory() as temporary:
        text = corpus.load(sources or Path(temporary))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(options, text, device)
    begun = time.monotonic()
    figures = trainer.run()
    size = export.save(trainer.network, out)
    far = Validation(text.held_out["king_james"], device, 2048).losses(trainer.network)
    report = {
        **figures,
        "nats_per_byte_by_position": [
            round(x, 4) for x in far.mean(0).view(8, -1).mean(1).tolist()
        ],
        "expert_loads": expert_loads(trainer.network, text.train, device),
        "seconds_with_compiling": round(time.monotonic() - begun, 1),
        "train_bytes": len(text.train),
        "held_out_bytes": {k: len(v) for k, v in text.held_out.items()},
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "weights_bytes": size,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": asdict(options),
        "history": [{k: round(v, 4) for k, v in entry.items()} for entry in trainer.history],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "history"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
