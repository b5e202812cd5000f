"""Reference of the sampler, and the exact rules that csrc/sampling.cu follows too.

Weights. l = logits, m = their maximum (NaN ignored), x = (l - m) * (1 / temperature) in float32,
w = round-half-even(exp(x) * 2^40) as an integer, and 2^40 where l = m. From here on every quantity
is an integer, so that sums are exact and free of order: the same weights give the same token on
any device, however the work is spread. NaN weighs 0.
Order. Higher logits first; equal logits (0 equals -0) by ascending id.
top_k keeps the first k in that order. top_p keeps, of those, the ones before which less than
max(1, floor(p * their total weight)) lies, p rounded down to a multiple of 2^-32. min_p keeps, of
those, w >= floor(min_p * 2^40). Draw: u = 64 random bits, r = floor(u * total / 2^64); the token
is the first kept one, in ascending order of ids, whose cumulative weight exceeds r.
Random bits. Philox4x32-10 with key (seed mod 2^32, seed >> 32) and counter (context_len, 0, 0, 0);
u = first word + second word * 2^32.
Greedy (temperature <= 0 or NaN): the first in that order; NaN only if all are NaN, then id 0.
The log-probability is that of the untempered softmax over the whole row, in float32.
Limits. Before all this the biases of the row's slot are added to the logits, then the logits of ids
that its mask forbids become -inf; the row is left so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd_kernels.reference.base import ReferenceBase
from latentd_kernels.reference.limits import within

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

WEIGHT_ONE = 1 << 40
"""The best token's weight. 2^40 times 2^24 ids still fits 64 bits."""
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011): four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def random_bits(seed: int, context_len: int) -> int:
    """The 64 random bits of a step: one draw a position."""
    words = philox4x32((context_len & _MASK32, 0, 0, 0), (seed & _MASK32, (seed >> 32) & _MASK32))
    return words[0] | words[1] << 32


def token_weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.uint64]:
    """Integer weights of one row of logits [vocab]; all 0 when every logit is NaN."""
    top = np.fmax.reduce(logits)
    with np.errstate(all="ignore"):
        x = (logits - top) * (np.float32(1) / np.float32(temperature))
        scaled = np.rint(np.exp(x) * np.float32(WEIGHT_ONE))
    scaled[logits == top] = WEIGHT_ONE
    return np.where(np.isnan(scaled), np.float32(0), scaled).astype(np.uint64)


def draw(
    logits: NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    bits: int,
) -> int:
    """The token of one row, by the rules above; `bits` is the 64-bit random number."""
    comparable = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    order = np.argsort(-comparable, kind="stable")  # descending; equal logits keep their ids' order
    order = order[~np.isnan(logits[order])]
    if order.size == 0:
        return 0
    if not temperature > 0:
        return int(order[0])
    weights = token_weights(logits, temperature)
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        inclusive = np.cumsum(weights[order])
        share = int(max(top_p, 0.0) * 2.0**32)
        limit = max(1, (int(inclusive[-1]) * share) >> 32)
        order = order[inclusive - weights[order] < np.uint64(limit)]
    least = int(min(min_p, 1.0) * WEIGHT_ONE) if min_p > 0 else 0
    ids = np.sort(order[weights[order] >= np.uint64(least)])
    cumulative = np.cumsum(weights[ids])
    target = (int(cumulative[-1]) * bits) >> 64
    return int(ids[np.searchsorted(cumulative, np.uint64(target), side="right")])


def normalizer(logits: NDArray[np.float32]) -> tuple[np.float32, np.float32]:
    """A row's maximum and the natural log of its sum of exponentials below that, float32; the log
    is NaN when every logit is."""
    top = np.fmax.reduce(logits)
    with np.errstate(all="ignore"):
        terms = np.where(logits == top, np.float32(1), np.exp(logits - top))
        total = np.nansum(terms, dtype=np.float32)
    return top, np.float32(math.log(total) if total > 0 else math.nan)


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural log of the token's probability under the softmax of the whole row, float32."""
    top, log_sum = normalizer(logits)
    with np.errstate(all="ignore"):
        shift = np.float32(0) if logits[token] == top else logits[token] - top
        return float(shift - log_sum)


class ReferenceSampling(ReferenceBase):
    """sample."""

    def sample(self, logits: Tensor, first_row: int, rows: int, limited: bool = True) -> None:
        """Choose one token a row (see `Ops.sample`); padding rows get -1 and 0."""
        inputs, ring = self.inputs, self.ring
        limits = ring.limits if limited else None
        for out_row in range(rows):
            row = first_row + out_row
            if int(inputs.slot_idx[row]) < 0:
                ring.tokens[out_row] = -1
                ring.logprobs[out_row] = 0.0
                continue
            values = logits[out_row].numpy()
            if limits is not None:
                values[:] = within(values, limits.read_seat(int(inputs.slot_idx[row])))
            token = draw(
                values,
                float(inputs.temperature[row]),
                int(inputs.top_k[row]),
                float(inputs.top_p[row]),
                float(inputs.min_p[row]),
                random_bits(int(inputs.seed[row]), int(inputs.context_len[row])),
            )
            ring.tokens[out_row] = inputs.last_token[inputs.slot_idx[row]] = token
            ring.logprobs[out_row] = log_probability(values, token)
            ring.normalizers[out_row] = torch.tensor(normalizer(values))
