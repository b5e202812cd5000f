"""Logit bias and masks in the samplers, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.limits import MAX_BIAS, NO_LIMITS, LimitRing, SeatLimits
from latentd_kernels.reference.limits import within
from latentd_kernels.reference.sampling import draw, log_probability, random_bits
from launching import CUDA, make_ops, randn, replay, stream

pytestmark = pytest.mark.gpu

SLOTS = 16


def make_limits(vocab: int, seed: int) -> SeatLimits:
    """By seed: nothing, a bias, a mask, both; few or many of each."""
    rng = np.random.default_rng(seed)
    ids, values, mask = NO_LIMITS
    if seed & 1:
        ids = rng.permutation(vocab)[: MAX_BIAS if seed & 4 else 3].astype(np.int32)
        values = rng.normal(0, 8, len(ids)).astype(np.float32)
    if seed & 2:
        allowed = rng.random(vocab) < (0.5 if seed & 4 else 5 / vocab)
        allowed[rng.integers(vocab)] = True
        bits = np.packbits(np.pad(allowed, (0, -vocab % 32)), bitorder="little")
        mask = bits.view(np.uint32)
    return SeatLimits(ids, values, mask)


@pytest.mark.parametrize("cluster", [True, False], ids=["cluster", "portable"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab", [9, 256, 5003, 102400])
def test_limited_rows_are_the_references(
    vocab: int, temperature: float, cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cluster:
        monkeypatch.setattr("latentd_kernels.sampling.MAX_CLUSTER_VOCAB", 0)
    torch.manual_seed(1)
    ops = make_ops()
    ops.ring.limits = LimitRing(vocab, SLOTS, 2, CUDA)
    ops.inputs.temperature.fill_(temperature)
    ops.inputs.context_len.copy_(torch.arange(len(ops.inputs.context_len)))
    ops.inputs.slot_idx[:SLOTS] = torch.arange(SLOTS - 1, -1, -1)
    limits = {slot: make_limits(vocab, slot) for slot in range(SLOTS)}
    ops.ring.limits.write(3, list(limits.items()))
    ops.place_limits(SLOTS, 3)
    original = randn(SLOTS, vocab, dtype=torch.float32, scale=3.0)
    logits = original.clone()
    ops.sample(logits, 0, SLOTS)
    host, found = original.cpu().numpy(), logits.cpu().numpy()
    for row in range(SLOTS):
        expected = within(host[row], limits[SLOTS - 1 - row])
        assert found[row].tobytes() == expected.tobytes()
        token = draw(expected, temperature, 0, 1.0, 0.0, random_bits(0, row))
        assert int(ops.ring.tokens[row]) == token
        logprob = float(ops.ring.logprobs[row])
        assert logprob == pytest.approx(log_probability(expected, token), abs=1e-5)
    tokens, logprobs = ops.ring.tokens.clone(), ops.ring.logprobs.clone()

    def again() -> None:
        logits.copy_(original)
        ops.sample(logits, 0, SLOTS)

    again()
    assert torch.equal(ops.ring.logprobs, logprobs)
    logits.copy_(original)
    replay(lambda: ops.sample(logits, 0, SLOTS))
    assert torch.equal(ops.ring.tokens, tokens)
    assert torch.equal(ops.ring.logprobs, logprobs)


def test_limits_hold_until_others_come_and_only_where_they_are_asked_for() -> None:
    torch.manual_seed(2)
    ops = make_ops()
    limits = ops.ring.limits = LimitRing(5003, SLOTS, 2, CUDA)
    original = randn(SLOTS, 5003, dtype=torch.float32, scale=3.0)

    def sample(limited: bool = True) -> torch.Tensor:
        logits = original.clone()
        ops.sample(logits, 0, SLOTS, limited)
        driver.synchronize(stream().cuda_stream)
        return ops.ring.tokens[:SLOTS].clone()

    free = sample()
    forbidden = {
        slot: SeatLimits(*NO_LIMITS[:2], np.full(157, 0xFFFFFFFF, np.uint32)) for slot in (3, 7)
    }
    for slot, seat in forbidden.items():
        assert seat.mask is not None
        token = int(free[slot])
        seat.mask[token // 32] &= ~np.uint32(1 << token % 32)
    limits.write(0, list(forbidden.items()))
    ops.place_limits(2, 0)
    changed = sample()
    assert [slot for slot in range(SLOTS) if free[slot] != changed[slot]] == [3, 7]
    assert torch.equal(sample(), changed)
    assert torch.equal(sample(limited=False), free)
    limits.write(1, [(3, NO_LIMITS)])
    ops.place_limits(1, 1)
    assert [slot for slot in range(SLOTS) if free[slot] != sample()[slot]] == [7]
