"""Which tensor of a checkpoint fills which part of the weights; knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from latentd.model.weights import DenseWeights

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.model.config import ModelConfig
    from latentd.model.weights import MoeWeights, Weights

KV_B: Final = ".self_attn.kv_b_proj.weight"
"""The end of the names of what attention needs."""


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint tensor goes: `view.copy_(source.view(view.shape))`."""

    shape: tuple[int, ...]  # in the checkpoint
    view: Tensor  # the same elements in the same order, in one, two or three dimensions


def destinations(config: ModelConfig, weights: Weights) -> dict[str, Destination]:
    """Every tensor of the checkpoint by its published name, with the place it fills."""
    found: dict[str, Destination] = {}
    if not weights.norm.numel():  # allocated for attention only
        for index, layer in enumerate(weights.layers):
            kv_b = layer.attention.kv_b
            found[f"model.layers.{index}{KV_B}"] = Destination(tuple(kv_b.shape), kv_b)
        return found

    def put(name: str, view: Tensor, shape: tuple[int, ...] | None = None) -> None:
        found[name] = Destination(shape or tuple(view.shape), view)

    put("model.embed_tokens.weight", weights.embed)
    for index, layer in enumerate(weights.layers):
        prefix, attention = f"model.layers.{index}.", layer.attention
        put(prefix + "input_layernorm.weight", attention.norm)
        q_rows = config.q_lora_rank or config.q_dim
        q_name = "q_a_proj" if config.q_lora_rank else "q_proj"
        put(f"{prefix}self_attn.{q_name}.weight", attention.qkv_a[:q_rows])
        put(prefix + "self_attn.kv_a_proj_with_mqa.weight", attention.qkv_a[q_rows:])
        if attention.q_norm is not None and attention.q_b is not None:
            put(prefix + "self_attn.q_a_layernorm.weight", attention.q_norm)
            put(prefix + "self_attn.q_b_proj.weight", attention.q_b)
        put(prefix + "self_attn.kv_a_layernorm.weight", attention.kv_norm)
        put(f"model.layers.{index}{KV_B}", attention.kv_b)
        put(prefix + "self_attn.o_proj.weight", attention.o)
        put(prefix + "post_attention_layernorm.weight", layer.mlp_norm)
        if isinstance(layer.mlp, DenseWeights):
            inner = config.dense_inner
            put(prefix + "mlp.gate_proj.weight", layer.mlp.gate_up[:inner])
            put(prefix + "mlp.up_proj.weight", layer.mlp.gate_up[inner:])
            put(prefix + "mlp.down_proj.weight", layer.mlp.down)
        else:
            _put_moe(config, prefix + "mlp.", layer.mlp, found)
    put("model.norm.weight", weights.norm)
    if weights.head is not weights.embed:
        put("lm_head.weight", weights.head)
    return found


def _put_moe(
    config: ModelConfig, prefix: str, mlp: MoeWeights, found: dict[str, Destination]
) -> None:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    found[prefix + "gate.weight"] = Destination((moe.num_experts, hidden), mlp.router)
    if mlp.bias is not None:
        found[prefix + "gate.e_score_correction_bias"] = Destination((moe.num_experts,), mlp.bias)
    rows, columns = (moe.inner, hidden), (hidden, moe.inner)
    for expert in range(moe.num_experts):
        name = f"{prefix}experts.{expert}."
        found[name + "gate_proj.weight"] = Destination(rows, mlp.gate_up[expert, : moe.inner])
        found[name + "up_proj.weight"] = Destination(rows, mlp.gate_up[expert, moe.inner :])
        found[name + "down_proj.weight"] = Destination(columns, mlp.down[expert])
    if not moe.router.num_shared:
        return
    shared_inner = moe.router.num_shared * moe.inner
    gate_up, down = mlp.gate_up[moe.num_experts :], mlp.down[moe.num_experts :]
    name, rows = prefix + "shared_experts.", (shared_inner, hidden)
    found[name + "gate_proj.weight"] = Destination(rows, gate_up[:, : moe.inner])
    found[name + "up_proj.weight"] = Destination(rows, gate_up[:, moe.inner :])
    found[name + "down_proj.weight"] = Destination((hidden, shared_inner), down.transpose(0, 1))
