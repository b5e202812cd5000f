"""Times the expert pair of a MoE layer, alone and with its router, beside torch.

The router's logits are random, so rows choose their experts evenly. Layers of different weights
stand in rotation; bytes are those of the experts that some row chose, read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from latentd.bench import floors, timing
from latentd.bench.gpu import CUDA, free_bytes
from latentd.bench.moe_torch import torch_us
from latentd.bench.report import Column
from latentd.options import StartError
from latentd_kernels.moe_workspace import allocate_moe_workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.bench.gpu import Gpu
    from latentd.bench.report import Report
    from latentd.model.config import ModelConfig
    from latentd.model.moe_config import MoeConfig

COLUMNS: Final = (
    Column("rows", "rows", width=6),
    Column("experts", "experts"),
    Column("time_us", "us", 2),
    Column("mb", "MB", 1),
    Column("tb_per_s", "TB/s", 2),
    Column("floor_us", "floor us", 2, 10),
    Column("of_copy", "% of copy", 0, 11),
    Column("of_read", "% of read", 0, 11),
    Column("torch_us", "torch us", 1, 10),
    Column("speedup", "speed-up", 2, 10),
    Column("block_us", "block us", 2, 10),
)


class Experts:
    """Random weights of some MoE layers, and the activations of `max_rows` rows."""

    def __init__(self, gpu: Gpu, config: ModelConfig, layers: int, max_rows: int) -> None:
        assert config.moe is not None
        moe: MoeConfig = config.moe
        self.moe, self.layers, self.hidden_size = moe, layers, config.hidden_size
        hidden, inner = config.hidden_size, moe.inner
        self.ops = gpu.make_ops("f32", max_slots=max_rows, max_pages=1)
        self.ops.inputs.slot_idx.copy_(torch.arange(len(self.ops.inputs.slot_idx)))
        self.gate_up = _draw(layers, moe.stacked, 2 * inner, hidden, std=hidden**-0.5)
        self.down = _draw(layers, moe.stacked, hidden, inner, std=inner**-0.5)
        self.router = _draw(layers, moe.num_experts, hidden, std=hidden**-0.5)
        self.bias = torch.zeros(moe.num_experts, device=CUDA) if moe.has_bias else None
        self.residual = torch.randn(max_rows, hidden, device=CUDA)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=CUDA)
        self.x = torch.empty(max_rows, hidden, dtype=torch.bfloat16, device=CUDA)
        self.logits = torch.empty(max_rows, moe.num_experts, device=CUDA)
        self.space = allocate_moe_workspace(
            max_rows, moe.choices, moe.stacked, inner, hidden, torch.bfloat16, CUDA
        )

    @property
    def stream(self) -> int:
        """Where everything is launched."""
        return self.ops.stream

    def route(self, layer: int, rows: int) -> None:
        """The norm in front, the router's product and the choice."""
        self.ops.norm_route(
            self.residual, self.norm, 1e-6, self.x, self.router[layer], self.bias, self.logits,
            self.moe.router, self.space, rows,
        )  # fmt: skip

    def block(self, layer: int, rows: int) -> None:
        """The whole block, as a step has it."""
        self.ops.moe(
            self.residual, self.norm, 1e-6, self.x, self.router[layer], self.bias, self.logits,
            self.gate_up[layer], self.down[layer], self.moe.router, self.space, rows,
        )  # fmt: skip

    def pair(self, layer: int, rows: int) -> None:
        """The two expert products, for the choices that are in the workspace."""
        gate_up, down = self.gate_up[layer], self.down[layer]
        self.ops.experts(self.x, gate_up, down, self.moe.router, self.space, rows)


def _draw(*shape: int, std: float) -> torch.Tensor:
    weights = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
    for layer in weights:
        layer.normal_(0.0, std)
    return weights


def measure(
    gpu: Gpu, config: ModelConfig, layers: int, rows: Sequence[int], rival: bool, report: Report
) -> None:
    """Print a line for every row count, microseconds a layer. Raises StartError for a model without
    experts, and for more layers than fit."""
    moe = config.moe
    if moe is None:
        raise StartError("this model has no experts: name another with --config")
    needed = layers * moe.stacked * floors.expert_bytes(moe.inner, config.hidden_size)
    free = free_bytes()
    report.note(f"weights: {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free")
    if needed > free * 0.9:
        raise StartError(f"{layers} layers do not fit: measure fewer with --layers")
    experts = Experts(gpu, config, layers, max(rows))
    about = (
        f"expert pair, {moe.num_experts} experts, {moe.router.top_k} a row and "
        f"{moe.router.num_shared} shared, {moe.inner} wide, hidden {config.hidden_size}; "
        "block: norm, router and choice too"
    )
    report.table("moe", about, COLUMNS)
    for num in rows:
        experts.route(0, num)
        chosen = experts.space.expert_ids[:num].clone()
        active = torch.unique(chosen).tolist()

        def pairs(num: int = num) -> None:
            for layer in range(layers):
                experts.pair(layer, num)

        def blocks(num: int = num) -> None:
            for layer in range(layers):
                experts.block(layer, num)

        ours = timing.graph_us(pairs, gpu.stream) / layers
        theirs = torch_us(experts, chosen) / layers if rival else None
        num_bytes = len(active) * floors.expert_bytes(moe.inner, config.hidden_size)
        block = timing.graph_us(blocks, gpu.stream) / layers
        row = floors.figures(num_bytes, ours, gpu.bandwidth, theirs)
        rate = num_bytes / ours / 1e6
        report.add(rows=num, experts=len(active), tb_per_s=rate, block_us=block, **row)
