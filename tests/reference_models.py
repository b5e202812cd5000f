"""Tiny models of transformers' own implementations, saved as checkpoints: the golden reference.

True head geometry (nope 128 or 192, rope 64, latent 512), everything else small. The weights are
drawn large enough that attention is peaked, routers decide and logits spread over some units.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from latentd.model.config import ModelConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCAB = 160
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}
_GLM = {key: value for key, value in _SMALL.items() if key != "first_k_dense_replace"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", _SMALL | {
        "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
        "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "v2-groups": ("DeepseekV2", _SMALL | {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 4.0, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    }),
    "v3": ("DeepseekV3", _SMALL | {
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_attention_heads": 3,
        "num_key_value_heads": 3, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "moonlight": ("DeepseekV3", _SMALL | {
        "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }),
    "v3-tied-half-rope": ("DeepseekV3", _SMALL | {
        "tie_word_embeddings": True, "rope_interleave": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "rope_parameters": _YARN,
    }),
    "glm": ("Glm4MoeLite", _GLM | {
        "rms_norm_eps": 1e-5, "mlp_layer_types": ["dense", "sparse", "dense"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
}  # fmt: skip
"""Name: (transformers' class prefix, config), covering each spelling and rule that is served."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"model_type": "deepseek_v2", "norm_topk_prob": False},
    "DeepseekV3": {
        "model_type": "deepseek_v3", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    },
    "Glm4MoeLite": {
        "model_type": "glm4_moe_lite", "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "qk_nope_head_dim": 192, "v_head_dim": 256,
    },
}  # fmt: skip
"""What the classes fill in where a case is silent."""


def config_of(name: str) -> ModelConfig:
    """A case's config without transformers, for machines that lack it."""
    prefix, values = CASES[name]
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6}
    heads = {"qk_nope_head_dim": 128, "v_head_dim": 128}
    return ModelConfig.from_dict(widths | heads | _DEFAULTS[prefix] | values)


def build(name: str) -> Any:
    """The float32 model of a case, with fixed random weights."""
    import transformers

    prefix, values = CASES[name]
    config = getattr(transformers, f"{prefix}Config")(**values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            if key.endswith("_bias"):
                value.copy_(0.1 * noise)
            elif value.dim() == 1:
                value.copy_(1 + 0.1 * noise)
            elif key.endswith("embed_tokens.weight"):
                value.copy_(noise)
            else:
                value.copy_(noise * (1.5 * value.shape[-1] ** -0.5))
    model.tie_weights()
    return model


def save(model: Any, path: Path) -> None:
    """Write the checkpoint as transformers does, in two shards."""
    model.save_pretrained(path, max_shard_size="600KB")


def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token, in one causal pass without a cache: [len(tokens), vocab]."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    result: torch.Tensor = output.logits[0]
    return result


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by `count` tokens, from scratch each time: no cache to trust."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def load_pretrained(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of a checkpoint directory, with attention and experts written out."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.train(False)
    return model


def logits_and_experts(
    model: Any, tokens: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits after each token, and of every router the chosen expert ids [len(tokens), top_k]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for name, module in model.named_modules()
        if name.endswith(".mlp.gate")
    ]
    try:
        return logits(model, tokens).float(), chosen
    finally:
        for hook in hooks:
            hook.remove()


def choices(path: Path, tokens: Sequence[int]) -> dict[str, Any]:
    """What the bf16 reference of a checkpoint chooses after each token, as plain numbers: its five
    best tokens with their logits, and every router's experts."""
    values, experts = logits_and_experts(load_pretrained(path, torch.bfloat16), tokens)
    best = values.topk(5)
    return {
        "tokens": list(tokens),
        "best": best.indices.tolist(),
        "logits": best.values.tolist(),
        "experts": [ids.sort(dim=1).values.tolist() for ids in experts],
    }
