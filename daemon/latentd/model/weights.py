"""The weights as the forward reads them: fused and stacked, allocated once on the device. Which
tensor of a checkpoint fills which part: `destinations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from latentd_kernels.geometry import LATENT_DIM

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.model.config import ModelConfig


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention. Without a query rank q_norm and q_b are None."""

    norm: Tensor  # [hidden], input_layernorm
    qkv_a: Tensor  # [q_lora_rank or heads * (nope + 64), then 576; hidden]
    q_norm: Tensor | None  # [q_lora_rank]
    q_b: Tensor | None  # [heads * (nope + 64), q_lora_rank]
    kv_norm: Tensor  # [512]
    kv_b: Tensor  # [heads * (nope + v), 512], as in the checkpoint
    o: Tensor  # [hidden, heads * v]


@dataclass(frozen=True)
class DenseWeights:
    """A dense feed-forward layer."""

    gate_up: Tensor  # [2 * inner, hidden], gate rows first
    down: Tensor  # [hidden, inner]


@dataclass(frozen=True)
class MoeWeights:
    """A routed layer; the shared expert lies behind the routed ones, cut to their inner size."""

    router: Tensor  # [experts, hidden]
    bias: Tensor | None  # [experts] float32
    gate_up: Tensor  # [experts + shared, 2 * inner, hidden]
    down: Tensor  # [experts + shared, hidden, inner]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention: AttentionWeights
    mlp_norm: Tensor  # [hidden], post_attention_layernorm
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class Weights:
    """All weights, bf16 on cuda and float32 on the cpu; never written after the load.

    `content_hash` names the values: of the checkpoint's bytes, or of the seed of random weights.
    """

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the same tensor as `embed` if the head is tied
    content_hash: str = ""


def weight_dtype(device: torch.device) -> torch.dtype:
    """How weights are held: the cpu reference multiplies in float32 and keeps copies in it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def allocate(config: ModelConfig, device: torch.device, attend_only: bool = False) -> Weights:
    """Unfilled weights on `device` ("meta" gives the shapes alone); with `attend_only` all but
    kv_b are empty."""
    dtype = torch.bfloat16 if device.type == "meta" else weight_dtype(device)
    if attend_only:
        return _allocate_kv_b(config, device, dtype)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # Of the shapes by hand: torch.empty_like on "meta" imports sympy, a third of a second and more.
    embed = new(config.vocab_size, config.hidden_size)
    head = embed if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size)
    layers = []
    for routed in config.moe_layers:
        attention = AttentionWeights(
            norm=new(config.hidden_size),
            qkv_a=new(config.qkv_a_dim, config.hidden_size),
            q_norm=new(config.q_lora_rank) if config.q_lora_rank else None,
            q_b=new(config.q_dim, config.q_lora_rank) if config.q_lora_rank else None,
            kv_norm=new(LATENT_DIM),
            kv_b=new(config.num_heads * (config.nope_dim + config.v_dim), LATENT_DIM),
            o=new(config.hidden_size, config.o_dim),
        )
        mlp = _allocate_moe(config, device, dtype) if routed else DenseWeights(
            new(2 * config.dense_inner, config.hidden_size),
            new(config.hidden_size, config.dense_inner),
        )  # fmt: skip
        layers.append(LayerWeights(attention, new(config.hidden_size), mlp))
    return Weights(embed, tuple(layers), new(config.hidden_size), head)


def _allocate_kv_b(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    nothing = torch.empty(0, dtype=dtype, device=device)
    rows = config.num_heads * (config.nope_dim + config.v_dim)
    layers = []
    for _ in range(config.num_layers):
        kv_b = torch.empty(rows, LATENT_DIM, dtype=dtype, device=device)
        attention = AttentionWeights(nothing, nothing, None, None, nothing, kv_b, nothing)
        layers.append(LayerWeights(attention, nothing, DenseWeights(nothing, nothing)))
    return Weights(nothing, tuple(layers), nothing, nothing)


def _allocate_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> MoeWeights:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    bias = None
    if moe.has_bias:
        bias = torch.empty(moe.num_experts, dtype=torch.float32, device=device)
    return MoeWeights(
        router=torch.empty(moe.num_experts, hidden, dtype=dtype, device=device),
        bias=bias,
        gate_up=torch.empty(moe.stacked, 2 * moe.inner, hidden, dtype=dtype, device=device),
        down=torch.empty(moe.stacked, hidden, moe.inner, dtype=dtype, device=device),
    )


def tensors(weights: Weights) -> list[Tensor]:
    """Every allocated tensor once, in a fixed order."""
    found = [weights.embed]
    for layer in weights.layers:
        parts = [*vars(layer.attention).values(), layer.mlp_norm, *vars(layer.mlp).values()]
        found.extend(part for part in parts if part is not None)
    found.append(weights.norm)
    return found if weights.head is weights.embed else [*found, weights.head]


def weight_bytes(config: ModelConfig, device: torch.device, attend_only: bool = False) -> int:
    """Bytes that the weights take on `device`; allocates nothing."""
    wide = weight_dtype(device).itemsize
    shapes = tensors(allocate(config, torch.device("meta"), attend_only))
    return sum(t.numel() * max(t.dtype.itemsize, wide) for t in shapes)
