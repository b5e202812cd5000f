"""Rope as a config.json describes it, default or YaRN, in both spellings: frequencies, scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd.model.fields import CheckpointError, Fields
from latentd_kernels.geometry import ROPE_DIM

if TYPE_CHECKING:
    import torch

    from latentd_kernels.ops import Rope


@dataclass(frozen=True)
class YarnParams:
    """YaRN's stretch of the frequencies (arXiv 2309.00071), as DeepSeek's files spell it."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_ctx: int  # original_max_position_embeddings
    truncate: bool  # round the ramp's ends to whole dimensions


@dataclass(frozen=True)
class RopeParams:
    """Everything about the rotation that a config says."""

    theta: float
    interleaved: bool  # pairs are (2i, 2i+1); else (i, i+32)
    magnitude: float  # multiplies cos and sin
    score_factor: float  # multiplies (nope + rope)^-0.5: m^2 with m = 0.1 mscale_all_dim ln f + 1
    yarn: YarnParams | None

    def inv_freq(self) -> torch.Tensor:
        """Radians per position of each of the 32 pairs: [32] float32 on the host.

        float32 in the order of the reference model, so that both turn by the same angles.
        """
        import torch

        pos_freqs = self.theta ** (torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM)
        if self.yarn is None:
            return 1.0 / pos_freqs
        low, high = _ramp_ends(self.yarn, self.theta)
        steps = torch.arange(ROPE_DIM // 2, dtype=torch.float32)
        stretched = torch.clamp((steps - low) / (high - low), 0, 1)
        kept = 1 - stretched
        return 1.0 / (self.yarn.factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept

    def to_ops(self, device: torch.device) -> Rope:
        """The form the operations take, with the frequencies on `device`."""
        from latentd_kernels.ops import Rope

        return Rope(self.inv_freq().to(device), self.magnitude, self.interleaved)


def _ramp_ends(yarn: YarnParams, theta: float) -> tuple[float, float]:
    """First and last pair of the ramp between kept and stretched frequencies."""

    def pair_of(rotations: float) -> float:
        turns = yarn.original_ctx / (rotations * 2 * math.pi)
        return ROPE_DIM * math.log(turns) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, ROPE_DIM - 1)
    return low, high + 0.001 if low == high else high


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(fields: Fields) -> RopeParams:
    """Read `rope_scaling` (published files, beside `rope_theta`) or `rope_parameters`.

    Refuses rope types other than default and yarn, partial rotation, and per-layer parameters.
    """
    key = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    value = fields.values.get(key) or {}
    if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
        raise fields.refuse(key, "null or one flat object")
    rope = Fields({"rope_theta": fields.values.get("rope_theta"), **value}, f"config.json: {key}")
    type_key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.choice(type_key, ("default", "yarn"), "default")
    fields.demand("partial_rotary_factor", 1)
    rope.demand("partial_rotary_factor", 1)
    interleaved = fields.boolean("rope_interleave", True)
    theta = rope.number("rope_theta")
    if theta <= 1:
        raise rope.refuse("rope_theta", "a number above 1")
    if kind == "default":
        return RopeParams(theta, interleaved, 1.0, 1.0, None)
    return _read_yarn(fields, rope, theta, interleaved)


def _read_yarn(fields: Fields, rope: Fields, theta: float, interleaved: bool) -> RopeParams:
    original = rope.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
    if factor < 1:
        raise rope.refuse("factor", "a number of at least 1")
    mscale, mscale_all_dim = _optional(rope, "mscale"), _optional(rope, "mscale_all_dim")
    if rope.has("attention_factor"):
        magnitude = rope.number("attention_factor")
    elif mscale and mscale_all_dim:
        magnitude = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        magnitude = _mscale(factor, 1.0)
    yarn = YarnParams(
        factor=factor,
        beta_fast=rope.number("beta_fast", 32),
        beta_slow=rope.number("beta_slow", 1),
        original_ctx=original,
        truncate=rope.boolean("truncate", True),
    )
    score_factor = _mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0
    return RopeParams(theta, interleaved, magnitude, score_factor, yarn)


def _optional(rope: Fields, key: str) -> float:
    """A number, or 0 where it is absent or 0 (both mean: not used)."""
    if rope.values.get(key) in (None, 0):
        return 0.0
    try:
        return rope.number(key)
    except CheckpointError:
        raise rope.refuse(key, "a number of at least 0, or null") from None
