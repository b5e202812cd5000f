"""The rivals of the expert pair: the chosen experts in a loop of cuBLAS products, and torch's
grouped product over all experts; each in a graph.

The host knows the choices beforehand, which a real step would have to read back or sort on the
device; neither is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import grouped_mm, silu

from latentd.bench import timing

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.bench.moe import Experts


def torch_us(experts: Experts, chosen: Tensor) -> float:
    """Microseconds of all layers by the faster of the two. chosen [rows, choices] int32."""
    x, layers = experts.x, list(zip(experts.gate_up, experts.down, strict=True))
    rows_of = rows_by_expert(chosen)
    rows, ends = grouping(chosen, experts.moe.stacked)

    def loop() -> None:
        for gate_up, down in layers:
            loop_layer(x, gate_up, down, rows_of)

    def grouped() -> None:
        for gate_up, down in layers:
            grouped_layer(x, gate_up, down, rows, ends)

    return min(timing.torch_graph_us(loop), timing.torch_graph_us(grouped))


def rows_by_expert(chosen: Tensor) -> dict[int, Tensor]:
    """The rows that chose each expert, in order."""
    return {
        expert: (chosen == expert).any(dim=1).nonzero().flatten()
        for expert in torch.unique(chosen).tolist()
    }


def loop_layer(
    x: Tensor, gate_up: Tensor, down: Tensor, rows_of: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Each chosen expert's rows gathered, multiplied, gated and multiplied again."""
    return {
        expert: torch.matmul(_gated(torch.matmul(x[rows], gate_up[expert].T)), down[expert].T)
        for expert, rows in rows_of.items()
    }


def grouping(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The row of each entry, grouped by expert, and where each expert's entries end (int32)."""
    flat = chosen.flatten()
    rows = flat.argsort(stable=True) // chosen.shape[1]
    return rows, torch.bincount(flat, minlength=num_experts).cumsum(0).to(torch.int32)


def grouped_layer(x: Tensor, gate_up: Tensor, down: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """All entries gathered, and two grouped products: [entries, hidden]."""
    both = grouped_mm(x[rows], gate_up.mT, offs=ends)
    return grouped_mm(_gated(both), down.mT, offs=ends)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up
