"""Streaming rate of `linear` beside torch.matmul, in TB/s of weights read.

Median of replayed graphs over enough different weights to leave the L2 cache far behind; both sides
in the same run. `pytest -m gpu -s tests/bench/bench_linear.py` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor

from latentd_kernels import driver
from launching import make_ops, randn, stream

Weights = list[Tensor]

pytestmark = pytest.mark.gpu

SHAPES = [
    (3072, 2048),
    (576, 2048),
    (2048, 2048),
    (21888, 2048),
    (2048, 10944),
    (102400, 2048),
    (16896, 2048),
    (2048, 8448),
    (12288, 7168),
    (7168, 12288),
    (4096, 512),
]
ROWS = (1, 8, 16, 32, 64, 128, 512)
WEIGHT_BYTES = 1_000_000_000  # a graph's weights: 16 times the L2 cache of an H200
MAX_WEIGHTS = 64
REPLAYS = 7


def replay_seconds(run: Callable[[], None]) -> float:
    """Median device time of a graph of `run`."""
    handle = stream().cuda_stream
    run()
    driver.begin_capture(handle)
    run()
    graph = driver.end_capture(handle)
    start, end = driver.Event(), driver.Event()
    times = []
    for _ in range(REPLAYS):
        start.record(handle)
        graph.launch(handle)
        end.record(handle)
        end.synchronize()
        times.append(end.elapsed_ms(start) / 1e3)
    graph.close()
    return median(times[1:])


def test_linear_rates() -> None:
    torch.manual_seed(0)
    ops = make_ops()
    header = "".join(f"{f'n={rows}':>20}" for rows in ROWS)
    print(f"\nlinear | torch.matmul, TB/s of weights\n{'M x K':>14}{header}")
    for m, k in SHAPES:
        num_bytes = m * k * 2
        count = max(2, min(MAX_WEIGHTS, WEIGHT_BYTES // num_bytes))
        weights = [randn(m, k, scale=k**-0.5) for _ in range(count)]
        cells = []
        for rows in ROWS:
            x, out = randn(rows, k), randn(rows, m)

            def ours(weights: Weights = weights, x: Tensor = x, out: Tensor = out) -> None:
                for weight in weights:
                    ops.linear(x, weight, out, len(x))

            def theirs(weights: Weights = weights, x: Tensor = x, out: Tensor = out) -> None:
                for weight in weights:
                    torch.matmul(x, weight.T, out=out)

            rates = [num_bytes * count / replay_seconds(run) / 1e12 for run in (ours, theirs)]
            cells.append(f"{rates[0]:.2f} | {rates[1]:.2f} ({rates[0] / rates[1]:.2f})")
        print(f"{f'{m} x {k}':>14}" + "".join(f"{cell:>20}" for cell in cells))
