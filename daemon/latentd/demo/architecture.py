"""The shape of the demo model, as its config.json publishes it; plain data, no torch."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 1408,
    "moe_intermediate_size": 224,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}
HIDDEN: int = CONFIG["hidden_size"]
HEADS: int = CONFIG["num_attention_heads"]
LATENT: int = CONFIG["kv_lora_rank"]
NOPE: int = CONFIG["qk_nope_head_dim"]
ROPE: int = CONFIG["qk_rope_head_dim"]
VALUE: int = CONFIG["v_head_dim"]
EXPERTS: int = CONFIG["n_routed_experts"]
EXPERT_WIDTH: int = CONFIG["moe_intermediate_size"]
EPS: float = CONFIG["rms_norm_eps"]
