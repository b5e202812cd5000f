"""What invariance costs in a step: its linear layers by our kernels and by cuBLAS, its attention
with the rule's cut of contexts and with the best one for the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd.bench import timing
from latentd.bench.attention import Layers
from latentd.bench.attention_plan import Plan
from latentd.bench.attention_splits import best_cut
from latentd.bench.linear import products_us
from latentd.bench.report import Column
from latentd.bench.shapes import matrices
from latentd.model.weights import DenseWeights, MoeWeights
from latentd_kernels.cuda_ops import CudaOps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from latentd.bench.gpu import Gpu
    from latentd.bench.report import Report
    from latentd.bench.step import Steps
    from latentd.model.weights import Weights

COLUMNS: Final = (
    Column("rows", "rows", width=6),
    Column("context", "context"),
    Column("step_us", "step us", 1, 10),
    Column("linears_us", "linears us", 1, 12),
    Column("cublas_us", "cuBLAS us", 1, 11),
    Column("attention_us", "attention us", 1, 14),
    Column("best_cut_us", "best cut us", 1, 13),
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
    steps: Steps, gpu: Gpu, step_us: Mapping[tuple[int, int], float], report: Report
) -> None:
    """Print, for every measured pair of rows and context, how much shorter the step would be if
    each linear layer went to cuBLAS wherever that is faster (it is given the product alone), and
    attention cut contexts as it is best for the batch. Routers stay: they share a node with a norm
    and the choice."""
    ops = gpu.make_ops("f32", max_slots=1, max_pages=1)
    about = "what invariance costs: the step with its linear layers by cuBLAS and the best cut"
    report.table("invariance", about, COLUMNS)
    for rows in dict.fromkeys(rows for rows, _ in step_us):
        ours, theirs = _linears(steps, ops, rows)
        faster = [name for name in ours if theirs[name] < ours[name]]
        linears_gain = sum(ours[name] - theirs[name] for name in faster)
        for context in (context for num, context in step_us if num == rows):
            attention_us, best_us = _attention(steps, gpu, rows, context)
            gain = linears_gain + attention_us - min(best_us, attention_us)
            whole = step_us[rows, context]
            report.add(
                rows=rows, context=context, step_us=whole, linears_us=sum(ours.values()),
                cublas_us=sum(theirs.values()), attention_us=attention_us, best_cut_us=best_us,
                gain_us=gain, gain_percent=100 * gain / whole, faster=", ".join(faster) or "none",
            )  # fmt: skip


def _linears(steps: Steps, ops: CudaOps, rows: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of all layers' products by name: ours, and cuBLAS's."""
    model = steps.backend.runner.model
    own = weights_of(model.weights)
    used = [matrix for matrix in matrices(model.config) if matrix.name != "router"]
    both = {
        matrix.name: products_us(ops, own[matrix.name], matrix.form, rows, rival=True)
        for matrix in used
    }
    ours = {name: ours_us for name, (ours_us, _) in both.items()}
    return ours, {name: theirs_us or 0.0 for name, (_, theirs_us) in both.items()}


def _attention(steps: Steps, gpu: Gpu, rows: int, context: int) -> tuple[float, float]:
    """Microseconds of all layers' attention as it is, and with the best cut (the same where the
    kernels cut by themselves), on the engine's slab."""
    runner = steps.backend.runner
    config, slab, ops = runner.model.config, runner.buffers.slab, runner.ops
    assert isinstance(ops, CudaOps)
    plan = Plan(
        [(config.num_heads, rows, context)], config.num_layers, steps.engine.info.max_ctx,
        config.nope_dim, config.v_dim, ops.numerics, chunk=False, parts=False, rival=False,
    )  # fmt: skip
    layers = Layers(gpu, plan, slab, config.num_heads, rows)
    graph = layers.graphs()["time_us"]
    layers.set_context(context)
    ours = timing.replay_us(graph, gpu.stream)
    best = best_cut(layers, graph, context)
    graph.close()
    return ours, ours if best is None else best[1] * config.num_layers
