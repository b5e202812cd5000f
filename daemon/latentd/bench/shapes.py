"""What is measured unless somebody says otherwise, and the products of a model by shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from latentd_kernels.geometry import LATENT_DIM

if TYPE_CHECKING:
    from latentd.model.config import ModelConfig

Form = Literal["bf16", "f32", "add", "gated"]
"""Where a product goes: bf16, float32, added to a float32 residual, or gated by silu into bf16."""

ATTENTION_GRID: Final = (
    (16, 1, 1024), (16, 1, 4096), (16, 1, 32768), (16, 8, 1024), (16, 8, 8192), (16, 16, 4096),
    (16, 64, 8192), (96, 1, 1024), (96, 1, 4096), (96, 1, 32768), (96, 8, 1024), (96, 8, 8192),
    (96, 16, 4096), (96, 64, 8192), (128, 1, 4096), (128, 16, 4096), (128, 128, 4096),
)  # fmt: skip
"""Heads, rows and context of the attention benchmark."""
CHUNK_GRID: Final = tuple(
    (heads, 512, context) for heads in (16, 128) for context in (512, 4096, 32768)
)
"""The same of a prompt's last rows."""
ATTENTION_LAYERS: Final = 24
CHUNK_LAYERS: Final = 4
MAX_CTX: Final = 65_536
"""What graphs are captured for; they are replayed at all lengths."""
LINEAR_ROWS: Final = (1, 8, 16, 32, 64, 128, 512)
MOE_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 512)
STEP_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
STEP_CONTEXTS: Final = (1024, 8192, 32768)


@dataclass(frozen=True)
class Matrix:
    """A product of the step: [features, k] bf16 weights, a form, and what the model calls it."""

    name: str
    features: int
    k: int
    form: Form

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self.features * self.k * 2


def matrices(config: ModelConfig) -> Counter[Matrix]:
    """The linear layers of a step, with how many layers have each. Experts are not among them,
    nor is kv_b, which attention reads."""
    hidden, layers, moe = config.hidden_size, config.num_layers, config.moe
    routed = sum(config.moe_layers)
    found: Counter[Matrix] = Counter()
    found[Matrix("qkv_a", config.qkv_a_dim, hidden, "bf16")] = layers
    if config.q_lora_rank:
        found[Matrix("q_b", config.q_dim, config.q_lora_rank, "bf16")] = layers
    found[Matrix("o", hidden, config.o_dim, "add")] = layers
    if routed < layers:
        found[Matrix("gate_up", 2 * config.dense_inner, hidden, "gated")] = layers - routed
        found[Matrix("down", hidden, config.dense_inner, "add")] = layers - routed
    if moe is not None and routed:
        found[Matrix("router", moe.num_experts, hidden, "f32")] = routed
    found[Matrix("head", config.vocab_size, hidden, "f32")] = 1
    return found


def kv_b_bytes(config: ModelConfig) -> int:
    """Bytes of one layer's kv_b_proj, which absorb and expand read."""
    return config.num_heads * (config.nope_dim + config.v_dim) * LATENT_DIM * 2
