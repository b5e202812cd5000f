"""Random weights for `serve --weights random`: the shapes of a config without its checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from latentd.model.weights import AttentionWeights, DenseWeights, MoeWeights, allocate
from latentd_kernels.geometry import LATENT_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.model.config import ModelConfig
    from latentd.model.weights import Weights


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int,
    attend_only: bool = False,
) -> Weights:  # fmt: skip
    """Weights drawn on `device` from `seed`, scaled so that activations keep a size near one.

    A run in bfloat16 gets bf16 values on both backends; the same seed gives other values on
    another backend or with `attend_only`, and the content hash says so.
    """
    weights = allocate(config, device, attend_only)
    generator = torch.Generator(device).manual_seed(seed)
    land = dtype is torch.bfloat16 and device.type == "cpu"

    def draw(tensor: torch.Tensor, std: float) -> None:
        for part in tensor if tensor.dim() == 3 else (tensor,):
            part.normal_(0.0, std, generator=generator)
            if land:
                part.copy_(part.to(torch.bfloat16))

    if attend_only:
        for layer in weights.layers:
            draw(layer.attention.kv_b, LATENT_DIM**-0.5)
    else:
        _draw_all(config, weights, draw)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the engine reads them on a stream of its own
    kind = "kv_b" if attend_only else "random"
    text = f"{kind} {seed} {device.type} {torch.__version__} {dtype} {config!r}"
    return replace(weights, content_hash=hashlib.sha256(text.encode()).hexdigest())


def _draw_all(
    config: ModelConfig, weights: Weights, draw: Callable[[torch.Tensor, float], None]
) -> None:
    draw(weights.embed, 1.0)
    if weights.head is not weights.embed:
        draw(weights.head, config.hidden_size**-0.5)
    weights.norm.fill_(1.0)
    branch = (2 * config.num_layers) ** -0.5  # the residual stream sums two branches a layer
    for layer in weights.layers:
        layer.mlp_norm.fill_(1.0)
        _draw_attention(layer.attention, draw, branch)
        _draw_mlp(layer.mlp, draw, branch)


def _draw_attention(
    weights: AttentionWeights, draw: Callable[[torch.Tensor, float], None], branch: float
) -> None:
    weights.norm.fill_(1.0)
    weights.kv_norm.fill_(1.0)
    if weights.q_norm is not None:
        weights.q_norm.fill_(1.0)
    for matrix in (weights.qkv_a, weights.q_b, weights.kv_b):
        if matrix is not None:
            draw(matrix, matrix.shape[-1] ** -0.5)
    draw(weights.o, branch * weights.o.shape[-1] ** -0.5)


def _draw_mlp(
    weights: DenseWeights | MoeWeights, draw: Callable[[torch.Tensor, float], None], branch: float
) -> None:
    draw(weights.gate_up, weights.gate_up.shape[-1] ** -0.5)
    draw(weights.down, branch * weights.down.shape[-1] ** -0.5)
    if isinstance(weights, MoeWeights):
        draw(weights.router, weights.router.shape[-1] ** -0.5)
        if weights.bias is not None:
            weights.bias.zero_()
