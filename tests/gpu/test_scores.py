"""Scores of rows of logits on the device: likeliest ids and log-probabilities of targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latentd_kernels import driver
from latentd_kernels.reference.scores import likeliest
from latentd_kernels.scores import MAX_TOP
from launching import make_ops, randn, stream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("top", [0, 1, 5, MAX_TOP])
@pytest.mark.parametrize(
    ("vocab", "rows"), [(9, 4), (256, 64), (5003, 7), (102400, 128), (524288, 2)]
)
def test_the_likeliest_ids_and_targets_are_the_references(vocab: int, rows: int, top: int) -> None:
    torch.manual_seed(vocab)
    ops = make_ops()
    logits = randn(rows, vocab, dtype=torch.float32, scale=3.0)
    logits[1] = logits[1].round()  # many equal ones
    logits[2:3, ::2] = torch.nan
    logits[3:4, 3:] = -torch.inf
    entry = ops.ring.scores.entry(5)
    targets = np.random.default_rng(1).integers(0, vocab, rows)
    targets[3:4] = 1
    entry.targets[10 : 10 + rows] = targets
    entry.targets[10] = -1
    ops.sample(logits, 0, rows)
    ops.score(logits, 0, rows, 10, top, 5)
    driver.synchronize(stream().cuda_stream)
    assert entry.done[10 : 10 + rows].tolist() == [6] * rows
    host, exact = logits.cpu().numpy(), torch.log_softmax(logits.nan_to_num(-torch.inf).double(), 1)
    expected = exact.cpu().numpy()
    for row in range(rows):
        ids = likeliest(host[row], top)
        found = entry.ids[10 + row, :top]
        assert found[: len(ids)].tolist() == ids.tolist()
        assert (found[len(ids) :] == -1).all()
        values = entry.logprobs[10 + row, : len(ids)]
        np.testing.assert_allclose(values, expected[row, ids], rtol=0, atol=2e-5)
        if row and np.isfinite(host[row, targets[row]]):
            value = entry.target_logprobs[10 + row]
            assert value == pytest.approx(expected[row, targets[row]], abs=2e-5)
    assert entry.target_logprobs[10] == 0


def test_a_scored_token_has_the_bits_of_its_own_log_probability_in_any_row() -> None:
    torch.manual_seed(2)
    ops = make_ops()
    ops.inputs.temperature.fill_(0.9)
    ops.inputs.context_len.copy_(torch.arange(len(ops.inputs.context_len)))
    logits = randn(64, 102400, dtype=torch.float32, scale=3.0)
    ops.sample(logits, 0, 64)
    tokens, logprobs = ops.ring.tokens[:64].cpu().numpy(), ops.ring.logprobs[:64].cpu().numpy()
    entry = ops.ring.scores.entry(0)
    entry.targets[:64] = tokens
    ops.score(logits, 0, 64, 0, MAX_TOP, 0)
    driver.synchronize(stream().cuda_stream)
    together = entry.logprobs[:64].copy()
    assert entry.target_logprobs[:64].tobytes() == logprobs.tobytes()
    for row in (0, 5, 63):
        ops.sample(logits[row:], row, 1)
        ops.score(logits, row, 1, 0, MAX_TOP, 0) if row == 0 else ops.score(
            logits[row:], 0, 1, 0, MAX_TOP, 0
        )
        driver.synchronize(stream().cuda_stream)
        assert entry.logprobs[0].tobytes() == together[row].tobytes()
