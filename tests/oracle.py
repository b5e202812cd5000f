"""Float64 oracle of latent attention, written from the formula; shares no code with any backend.

    k_h(t) = [W_UK[h] c(t) | r(t)]      score_h(t) = scale * q_h . k_h(t)
    v_h(t) = W_UV[h] c(t)               o_h = sum_t softmax(score_h)(t) v_h(t)

with c(t) the latent and r(t) the rope half of a cached row. This is the expanded form: nothing is
absorbed, so it also checks that absorption is the same function. `landed_attention` is different:
it repeats the certified chain of roundings, with float64 inside its sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotated(x: Tensor, position: int, inv_freq: Tensor, magnitude: float, pairs: str) -> Tensor:
    """x [..., 64] turned to a position, float64. `pairs` is "neighbours" or "halves". The angle is
    the float32 product that the model defines; sine and cosine of it are exact."""
    angle = (torch.tensor(float(position), device=x.device) * inv_freq.float()).double()
    turn = torch.polar(torch.full_like(angle, magnitude), angle)
    x = x.double()
    if pairs == "neighbours":
        z = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous()) * turn
        return torch.stack((z.real, z.imag), dim=-1).flatten(-2)
    z = torch.complex(x[..., :32].contiguous(), x[..., 32:].contiguous()) * turn
    return torch.cat((z.real, z.imag), dim=-1)


def attention(query: Tensor, rows: Tensor, kv_b: Tensor, nope_dim: int, scale: float) -> Tensor:
    """o [heads, v] float64 of one query [heads, nope + 64] (rope half already turned) over cached
    rows [tokens, 576]; kv_b [heads, nope + v, 512]. No rows: zeros."""
    heads, v_dim = kv_b.shape[0], kv_b.shape[1] - nope_dim
    out = torch.zeros(heads, v_dim, dtype=torch.float64, device=rows.device)
    if len(rows) == 0:
        return out
    latent, rope_half = rows[:, :512].double(), rows[:, 512:].double()
    for head in range(heads):
        w_uk, w_uv = kv_b[head, :nope_dim].double(), kv_b[head, nope_dim:].double()
        q_nope, q_rope = query[head, :nope_dim].double(), query[head, nope_dim:].double()
        scores = scale * (latent @ w_uk.T @ q_nope + rope_half @ q_rope)
        out[head] = w_uv @ (torch.softmax(scores, dim=0) @ latent)
    return out


def landed_attention(
    q_abs: Tensor, rows: Tensor, kv_b: Tensor, nope_dim: int, scale: float
) -> Tensor:
    """The landed chain for one absorbed query [heads, 576] bf16: o [heads, v], every value a bf16
    number (as float64). Each `_land` is a landing that the chain prescribes."""
    heads, v_dim = kv_b.shape[0], kv_b.shape[1] - nope_dim
    if len(rows) == 0:
        return torch.zeros(heads, v_dim, dtype=torch.float64, device=rows.device)
    cached = rows.double()
    dots = _land(q_abs.double() @ cached.T)
    scores = _land(dots * _land(torch.tensor(scale, dtype=torch.float64)).item())
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    probs = _land(weights / weights.sum(dim=1, keepdim=True))
    latent = _land(probs @ cached[:, :512])
    return _land(torch.einsum("hvc,hc->hv", kv_b[:, nope_dim:].double(), latent))


def ulps_at_rms(out: Tensor, expected: Tensor) -> Tensor:
    """|out - expected| [heads, v] in bf16 ULP at the RMS of each head of `expected`."""
    rms = expected.double().square().mean(dim=-1, keepdim=True).sqrt()
    ulp = torch.exp2(torch.floor(torch.log2(rms)) - 7)
    return (out.double() - expected.double()).abs() / ulp


def ulps_at_size(out: Tensor, expected: Tensor) -> Tensor:
    """The same in ULP of each element, or at the RMS where an element is smaller: what a value that
    lands once more or less is off by, large ones too."""
    rms = expected.double().square().mean(dim=-1, keepdim=True).sqrt()
    size = torch.maximum(expected.double().abs(), rms)
    return (out.double() - expected.double()).abs() / torch.exp2(torch.floor(torch.log2(size)) - 7)


def relative_l2(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected| over all elements; NaN never passes a comparison."""
    difference = out.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def _land(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()
