"""How many bytes must cross the memory bus, and how long that takes at a bandwidth.

The floor of a measurement is every weight it uses and every cached row it attends, read once.
Activations and partial results are left out: a few kilobytes a row that the L2 cache holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.bench.shapes import kv_b_bytes, matrices
from latentd_kernels.geometry import LATENT_DIM, ROW_DIM

if TYPE_CHECKING:
    from latentd.bench.gpu import Bandwidth
    from latentd.model.config import ModelConfig


def floor_us(num_bytes: int, bytes_per_s: float) -> float:
    """Microseconds that `num_bytes` take at a bandwidth."""
    return num_bytes / bytes_per_s * 1e6


def figures(
    num_bytes: int, time_us: float, bandwidth: Bandwidth, rival_us: float | None
) -> dict[str, float | None]:
    """The columns that every table has: megabytes, the floor at the bandwidth of a copy, the share
    of a copy's and of a read's bandwidth in percent, the rival, and how often ours is faster."""
    rate = num_bytes / time_us * 1e6
    return {
        "time_us": time_us,
        "mb": num_bytes / 1e6,
        "floor_us": floor_us(num_bytes, bandwidth.copy),
        "of_copy": 100 * rate / bandwidth.copy,
        "of_read": 100 * rate / bandwidth.read,
        "torch_us": rival_us,
        "speedup": None if rival_us is None else rival_us / time_us,
    }


def cache_bytes(rows: int, context: int, layers: int = 1) -> int:
    """Cached rows that a step attends."""
    return rows * context * ROW_DIM * 2 * layers


def attention_bytes(heads: int, nope_dim: int, v_dim: int, rows: int, context: int) -> int:
    """One layer's absorb, attend and expand: the cache, and W_UK and W_UV once."""
    return cache_bytes(rows, context) + heads * (nope_dim + v_dim) * LATENT_DIM * 2


def expert_bytes(inner: int, hidden_size: int) -> int:
    """Gate, up and down of one expert."""
    return 3 * inner * hidden_size * 2


def fixed_bytes(config: ModelConfig) -> int:
    """Weights that every step reads whatever its rows are: all but experts and the embedding."""
    products = sum(matrix.num_bytes * count for matrix, count in matrices(config).items())
    norms = config.hidden_size * (2 * config.num_layers + 1) * 2
    norms += (LATENT_DIM + (config.q_lora_rank or 0)) * config.num_layers * 2
    biases = 0
    if config.moe is not None and config.moe.has_bias:
        biases = config.moe.num_experts * 4 * sum(config.moe_layers)
    return products + norms + biases + kv_b_bytes(config) * config.num_layers


def step_bytes(config: ModelConfig, rows: int, context: int, visited: int) -> int:
    """A decode step of `rows` rows that attend `context` tokens each. `visited` counts the experts
    that it reads, shared ones too, over all layers."""
    total = fixed_bytes(config) + rows * config.hidden_size * 2  # and a row of the embedding each
    total += cache_bytes(rows, context, config.num_layers)
    if config.moe is not None:
        total += visited * expert_bytes(config.moe.inner, config.hidden_size)
    return total
