"""What invariance costs in a step: its linear layers by our kernels and by cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.bench.linear import ours_us, torch_us
from latentd.bench.report import Column
from latentd.bench.shapes import matrices
from latentd.model.weights import DenseWeights, MoeWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd.bench.report import Report
    from latentd.bench.step import Steps
    from latentd.model.weights import Weights
    from latentd_kernels.cuda_ops import CudaOps

COLUMNS: Final = (
    Column("rows", "rows", width=6),
    Column("step_us", "step us", 1, 10),
    Column("linears_us", "linears us", 1, 12),
    Column("cublas_us", "cuBLAS us", 1, 11),
    Column("gain_us", "gain us", 1),
    Column("gain_percent", "% of step", 2, 11),
    Column("faster", "cuBLAS is faster for", width=0),
)


def weights_of(weights: Weights) -> dict[str, list[Tensor]]:
    """The model's own matrices under the names of `shapes.matrices`, in the order of layers."""
    found: dict[str, list[Tensor]] = {}

    def take(name: str, matrix: Tensor | None) -> None:
        if matrix is not None:
            found.setdefault(name, []).append(matrix)

    for layer in weights.layers:
        take("qkv_a", layer.attention.qkv_a)
        take("q_b", layer.attention.q_b)
        take("o", layer.attention.o)
        if isinstance(layer.mlp, DenseWeights):
            take("gate_up", layer.mlp.gate_up)
            take("down", layer.mlp.down)
        else:
            assert isinstance(layer.mlp, MoeWeights)
            take("router", layer.mlp.router)
    take("head", weights.head)
    return found


def measure(
    steps: Steps, ops: CudaOps, rows: Sequence[int], context: int, repeats: int, report: Report
) -> None:
    """Print, for every row count, how much shorter the step would be if each linear layer went to
    cuBLAS wherever that is faster. cuBLAS is given the product alone, with bf16 out. Routers stay:
    they share a node with a norm and the choice."""
    model = steps.backend.runner.model
    own = weights_of(model.weights)
    about = f"what invariance costs: linear layers of the step at context {context} by cuBLAS"
    report.table("invariance", about, COLUMNS)
    for num in rows:
        steps.place(num, context)
        step_us = steps.time(repeats).device_us
        ours: dict[str, float] = {}
        theirs: dict[str, float] = {}
        for matrix in matrices(model.config):
            if matrix.name == "router":
                continue
            ours[matrix.name] = ours_us(ops, own[matrix.name], matrix.form, num)
            theirs[matrix.name] = torch_us(own[matrix.name], num)
        faster = [name for name in ours if theirs[name] < ours[name]]
        gain = sum(ours[name] - theirs[name] for name in faster)
        report.add(
            rows=num, step_us=step_us, linears_us=sum(ours.values()),
            cublas_us=sum(theirs.values()), gain_us=gain, gain_percent=100 * gain / step_us,
            faster=", ".join(faster) or "none",
        )  # fmt: skip
