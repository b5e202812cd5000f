"""Times linear layers as the model calls them, beside `torch.mm` of the same product.

Each side is a captured graph of many products, whose weights in rotation leave the L2 cache and the
translation of addresses far behind, as those of a step do; the graphs are replayed in blocks, so
that a product follows products of its own side, as it does where either is used.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from latentd.bench import floors, timing
from latentd.bench.gpu import CUDA, free_bytes
from latentd.bench.report import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from latentd.bench.gpu import Gpu
    from latentd.bench.report import Report
    from latentd.bench.shapes import Form, Matrix
    from latentd_kernels.cuda_ops import CudaOps

COLUMNS: Final = (
    Column("name", "matrix"),
    Column("shape", "M x K", width=15),
    Column("form", "out", width=7),
    Column("rows", "rows", width=6),
    Column("time_us", "us", 2),
    Column("mb", "MB", 1),
    Column("floor_us", "floor us", 2, 10),
    Column("of_copy", "% of copy", 0, 11),
    Column("of_read", "% of read", 0, 11),
    Column("torch_us", "torch us", 2, 10),
    Column("speedup", "speed-up", 2, 10),
)
ROTATION_BYTES: Final = 4_000_000_000
"""Weights of one graph, if half of the memory allows: far above any L2 cache, and so many launches
that the first ones, which find an idle GPU, count for little."""
_MAX_WEIGHTS: Final = 128
_FEWEST_WEIGHTS: Final = 3


def measure(
    gpu: Gpu, matrices: Sequence[Matrix], rows: Sequence[int], rival: bool, report: Report
) -> None:
    """Print a line for every matrix and row count, microseconds a product."""
    ops = gpu.make_ops("f32", max_slots=1, max_pages=1)
    about = "linear layers, weights in rotation; torch is the product alone, f32 out only for heads"
    report.table("linear", about, COLUMNS)
    for matrix in matrices:
        rotation = min(ROTATION_BYTES, free_bytes() // 2)
        count = max(_FEWEST_WEIGHTS, min(_MAX_WEIGHTS, rotation // matrix.num_bytes))
        shape = count, matrix.features, matrix.k
        weights = list(torch.empty(shape, dtype=torch.bfloat16, device=CUDA))
        for weight in weights:
            weight.normal_(0.0, matrix.k**-0.5)
        for num in rows:
            ours, theirs = products_us(ops, weights, matrix.form, num, rival)
            rival_us = theirs / count if theirs else None
            row = floors.figures(matrix.num_bytes, ours / count, gpu.bandwidth, rival_us)
            about = f"{matrix.features} x {matrix.k}"
            report.add(name=matrix.name, shape=about, form=matrix.form, rows=num, **row)
        del weights, weight


def products_us(
    ops: CudaOps, weights: Sequence[Tensor], form: Form, rows: int, rival: bool
) -> tuple[float, float | None]:
    """Microseconds of all these products in one graph of our launches, and of the same by
    torch, which is cuBLAS, without what our forms add, on the same activations; into float32 where
    our form is f32."""
    x = torch.randn(rows, weights[0].shape[1], device=CUDA).bfloat16()
    ours, theirs = _ours(ops, weights, form, x), _torch(weights, form, x)
    ours()
    graph = timing.capture(ours, ops.stream)
    launch = partial(graph.launch, ops.stream)
    try:
        if not rival:
            return timing.median_us(launch, ops.stream), None
        with timing.torch_graph(theirs) as other:
            ours_us, theirs_us = timing.medians_us([launch, other.replay], ops.stream)
        return ours_us, theirs_us
    finally:
        graph.close()


def _ours(ops: CudaOps, weights: Sequence[Tensor], form: Form, x: Tensor) -> Callable[[], None]:
    features, rows = weights[0].shape[0], x.shape[0]
    width = features // 2 if form == "gated" else features
    dtype = torch.float32 if form in ("f32", "add") else torch.bfloat16
    out = torch.zeros(rows, width, dtype=dtype, device=CUDA)

    def run() -> None:
        for weight in weights:
            if form == "gated":
                ops.gated_linear(x, weight, out, rows)
            else:
                ops.linear(x, weight, out, rows, accumulate=form == "add")

    return run


def _torch(weights: Sequence[Tensor], form: Form, x: Tensor) -> Callable[[], None]:
    # A head's logits are float32, from torch too: half as many bytes would be another product.
    multiply = partial(torch.mm, out_dtype=torch.float32) if form == "f32" else torch.mm

    def run() -> None:
        for weight in weights:
            multiply(x, weight.T)

    return run
