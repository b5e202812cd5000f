"""The rivals of the attention block, each in a graph: for decode rows batched cuBLAS products and
a float32 softmax, for a prompt's rows expanded attention by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

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


def expanded_us(layers: Layers, context: int) -> float | None:
    """Microseconds a layer of a prompt's last rows: keys and values of the whole context expanded
    by one product with kv_b, and torch's causal attention over them, with the values as they are or
    padded to the keys' width, whichever is faster. Not absorbed: another order of products, so
    other bits."""
    plan, heads, rows = layers.plan, layers.heads, layers.rows
    nope_dim, size = plan.nope_dim, context * ROW_DIM
    cache = layers.slab.view(-1)
    pieces = cache.numel() // size
    q = layers.q.view(rows, heads, -1).transpose(0, 1)[None]
    mask, scale = causal_lower_right(rows, context), (nope_dim + 64) ** -0.5

    def layer(index: int, padding: int) -> None:
        first = index % pieces * size
        cached = cache[first : first + size].view(context, ROW_DIM)
        both = torch.matmul(cached[:, :LATENT_DIM], layers.kv_b[index].T).view(context, heads, -1)
        rope_half = cached[:, None, LATENT_DIM:].expand(context, heads, -1)
        keys = torch.cat((both[..., :nope_dim], rope_half), dim=-1).transpose(0, 1)[None]
        values = pad(both[..., nope_dim:], (0, padding)).transpose(0, 1)[None]
        scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)

    def time_us(padding: int) -> float:
        def run() -> None:
            for index in range(plan.layers):
                layer(index, padding)

        return timing.torch_graph_us(run) / plan.layers

    return min(time_us(0), time_us(max(0, nope_dim + 64 - plan.v_dim)))
