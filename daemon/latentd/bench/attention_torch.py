"""The rival of the attention block: batched cuBLAS products and a float32 softmax, in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd.bench import timing
from latentd_kernels.geometry import LATENT_DIM, ROW_DIM

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.bench.attention import Layers


def torch_us(layers: Layers, context: int) -> float | None:
    """Microseconds a layer: bmm with W_UK, q K^T, softmax, P V, bmm with W_UV.

    It could not use pages, so each layer gets its latents as one contiguous piece of the slab; to
    gather them would cost more. A slab too small for all layers is read again by later ones; with
    one that does not hold a single layer there is no time.
    """
    plan, heads, rows = layers.plan, layers.heads, layers.rows
    size, cache = rows * context * ROW_DIM, layers.slab.view(-1)
    pieces = cache.numel() // size
    if not pieces:
        return None
    q = layers.q.view(rows, heads, -1)
    scale = (plan.nope_dim + 64) ** -0.5

    def layer(index: int) -> Tensor:
        first = index % pieces * size
        keys = cache[first : first + size].view(rows, context, ROW_DIM)
        weights = layers.kv_b[index].view(heads, -1, LATENT_DIM)
        w_uk, w_uv = weights[:, : plan.nope_dim], weights[:, plan.nope_dim :]
        latent = torch.bmm(q[..., : plan.nope_dim].transpose(0, 1), w_uk).transpose(0, 1)
        query = torch.cat((latent, q[..., plan.nope_dim :]), dim=-1)
        scores = torch.bmm(query, keys.mT) * scale
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).bfloat16()
        o_lat = torch.bmm(probs, keys[..., :LATENT_DIM])
        return torch.bmm(o_lat.transpose(0, 1), w_uv.mT).transpose(0, 1)

    def run() -> None:
        for index in range(plan.layers):
            layer(index)

    return timing.torch_graph_us(run) / plan.layers
