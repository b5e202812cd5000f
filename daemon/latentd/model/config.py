"""`ModelConfig`: a Hugging Face config.json of the latent-attention family, read and checked.

What a key means is decided here alone, per `model_type`; whatever the daemon does not serve is
refused by name before a device is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.model.fields import MAX_LAYERS, CheckpointError, Fields, read_files
from latentd.model.moe_config import MoeConfig, read_moe
from latentd.model.rope import RopeParams, read_rope
from latentd_kernels.attention_shapes import HEAD_WIDTHS, MAX_HEADS
from latentd_kernels.geometry import LATENT_DIM, ROPE_DIM, ROW_DIM, Geometry

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CheckpointError", "ModelConfig"]

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
LINEAR_STEP = 32
"""Every inner dimension of a linear is a multiple of this (`Ops.linear`)."""
LATENT_NORM_EPS = 1e-6
"""Of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says (so does the reference)."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass and the checkpoint reader need to know of a model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    nope_dim: int
    v_dim: int
    rms_norm_eps: float
    rope: RopeParams
    dense_inner: int  # intermediate_size of the dense layers
    moe: MoeConfig | None  # None: all layers are dense
    moe_layers: tuple[bool, ...]  # one per layer
    mtp_layers: int  # extra prediction layers behind the last one, not served
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int

    @property
    def q_dim(self) -> int:
        """Columns of all heads' queries before absorption."""
        return self.num_heads * (self.nope_dim + ROPE_DIM)

    @property
    def o_dim(self) -> int:
        """Columns of all heads' outputs."""
        return self.num_heads * self.v_dim

    @property
    def qkv_a_dim(self) -> int:
        """Rows of the fused first projection: queries (or their low rank), then the cached row."""
        return (self.q_lora_rank or self.q_dim) + ROW_DIM

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-0.5 times YaRN's m^2."""
        return float((self.nope_dim + ROPE_DIM) ** -0.5) * self.rope.score_factor

    @property
    def geometry(self) -> Geometry:
        """What the attention kernels must know."""
        return Geometry(
            self.num_heads, self.nope_dim, self.v_dim, self.num_layers, self.softmax_scale
        )

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read `path`/config.json (or `path` itself if it is a file) and, where it is there,
        generation_config.json beside it. Raises CheckpointError."""
        return cls.from_dict(*read_files(Path(path)))

    @classmethod
    def from_dict(
        cls, values: Mapping[str, object], generation: Mapping[str, object] | None = None
    ) -> ModelConfig:
        """Read the parsed config.json and generation_config.json. Raises CheckpointError."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        _refuse_unsupported(fields, model_type)
        heads = fields.integer("num_attention_heads")
        if heads > MAX_HEADS:
            raise fields.refuse("num_attention_heads", f"1 to {MAX_HEADS}")
        fields.demand("num_key_value_heads", heads)
        layers = fields.integer("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise fields.refuse("num_hidden_layers", f"1 to {MAX_LAYERS}")
        moe, moe_layers = read_moe(fields, model_type, layers)
        config = cls(
            model_type=model_type,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=_linear_dim(fields, "hidden_size"),
            num_layers=layers,
            num_heads=heads,
            q_lora_rank=_linear_dim(fields, "q_lora_rank") if fields.has("q_lora_rank") else None,
            nope_dim=fields.integer("qk_nope_head_dim"),
            v_dim=fields.integer("v_head_dim"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=read_rope(fields),
            dense_inner=_linear_dim(fields, "intermediate_size") if not all(moe_layers) else 0,
            moe=moe,
            moe_layers=moe_layers,
            mtp_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            eos_token_ids=_eos_ids(fields, generation or {}),
            max_position_embeddings=fields.integer("max_position_embeddings"),
        )
        if moe is not None and moe.inner % LINEAR_STEP:
            raise fields.refuse("moe_intermediate_size", f"a multiple of {LINEAR_STEP}")
        if (config.nope_dim, config.v_dim) not in HEAD_WIDTHS:
            shapes = " or ".join(f"({nope}, {v})" for nope, v in HEAD_WIDTHS)
            raise CheckpointError(
                f"config.json: (qk_nope_head_dim, v_head_dim) is "
                f"({config.nope_dim}, {config.v_dim}); supported: {shapes}"
            )
        return config


def _refuse_unsupported(fields: Fields, model_type: str) -> None:
    if fields.has("quantization_config"):
        value = fields.values["quantization_config"]
        method = value.get("quant_method") if isinstance(value, dict) else value
        raise CheckpointError(
            f"config.json: quantization_config with quant_method {method!r}; supported: none "
            "(latentd serves bfloat16 checkpoints)"
        )
    fields.demand("kv_lora_rank", LATENT_DIM)
    fields.integer("kv_lora_rank")
    fields.demand("qk_rope_head_dim", ROPE_DIM)
    fields.integer("qk_rope_head_dim")
    fields.demand("attention_bias", False)
    fields.demand("mlp_bias", False)
    fields.demand("hidden_act", "silu")
    if model_type == "deepseek_v2":
        fields.demand("rope_interleave", True)


def _linear_dim(fields: Fields, key: str) -> int:
    value = fields.integer(key)
    if value % LINEAR_STEP:
        raise fields.refuse(key, f"a multiple of {LINEAR_STEP}")
    return value


def _eos_ids(fields: Fields, generation: Mapping[str, object]) -> tuple[int, ...]:
    """Stop tokens: those of generation_config.json, else of config.json; an int, a list or null."""
    source = Fields(generation, "generation_config.json")
    source = source if source.has("eos_token_id") else fields
    value = source.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise source.refuse("eos_token_id", "a token id, a list of token ids, or null")
    return tuple(ids)
