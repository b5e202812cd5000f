from __future__ import annotations

import numpy as np
import pytest
import torch

from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.reference.sampling import draw, log_probability, random_bits
from latentd_kernels.sampling import MAX_CLUSTER_VOCAB
from launching import CUDA, make_ops, randn, replay

pytestmark = pytest.mark.gpu

SETTINGS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (5.0, 0, 1.0, 0.0),
    "top-k": (1.0, 40, 1.0, 0.0),
    "top-k-1": (1.0, 1, 1.0, 0.0),
    "top-p": (1.0, 0, 0.9, 0.0),
    "top-p-0": (1.0, 0, 0.0, 0.0),
    "min-p": (1.5, 0, 1.0, 0.05),
    "all": (0.8, 100, 0.95, 0.02),
    "tiny-temperature": (1e-38, 0, 1.0, 0.0),
}


def set_rows(ops: CudaOps, setting: tuple[float, int, float, float]) -> None:
    inputs = ops.inputs
    rows = len(inputs.top_k)
    for field, value in zip(
        (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p), setting, strict=True
    ):
        field.fill_(value)
    inputs.seed.copy_(torch.arange(rows) * 7919 - 3)  # negative ones are large unsigned seeds
    inputs.context_len.copy_(torch.arange(rows) * 13 + 1)


def expected(ops: CudaOps, logits: np.ndarray, row: int) -> int:
    inputs = ops.inputs
    seed = int(inputs.seed[row]) & (1 << 64) - 1
    return draw(
        logits[row],
        float(inputs.temperature[row]),
        int(inputs.top_k[row]),
        float(inputs.top_p[row]),
        float(inputs.min_p[row]),
        random_bits(seed, int(inputs.context_len[row])),
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [8, 256, 5000, 102400])
def test_tokens_equal_the_references(vocab: int, setting: str) -> None:
    torch.manual_seed(1)
    ops = make_ops()
    set_rows(ops, SETTINGS[setting])
    rows = 64 if vocab < 100_000 else 8
    logits = randn(rows, vocab, dtype=torch.float32, scale=3.0)
    ops.sample(logits, 0, rows)
    host = logits.cpu().numpy()
    tokens = ops.ring.tokens[:rows].tolist()
    assert tokens == [expected(ops, host, row) for row in range(rows)]
    assert ops.inputs.last_token[:rows].tolist() == tokens  # row and slot have one number here
    logprobs = torch.log_softmax(logits.double(), 1)[torch.arange(rows), tokens]
    torch.testing.assert_close(ops.ring.logprobs[:rows].double(), logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_ties_and_odd_values_follow_the_reference(setting: str) -> None:
    torch.manual_seed(2)
    ops = make_ops()
    set_rows(ops, SETTINGS[setting])
    logits = randn(64, 6000, dtype=torch.float32).mul(2).round()  # many equal logits, +0 and -0
    logits[0] = torch.nan
    logits[1, ::2] = torch.nan
    logits[2] = -torch.inf
    logits[3, 17] = torch.inf
    logits[3, 4097] = torch.inf
    logits[4] = 0.0
    logits[5, :5000] = -torch.inf
    logits[6] = -torch.inf
    logits[6, 0] = torch.nan
    ops.sample(logits, 0, 64)
    host = logits.cpu().numpy()
    assert ops.ring.tokens[:64].tolist() == [expected(ops, host, row) for row in range(64)]
    for row in range(1, 64):
        token = int(ops.ring.tokens[row])
        assert float(ops.ring.logprobs[row]) == pytest.approx(
            log_probability(host[row], token), abs=1e-5
        )


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_samplers_choose_the_same_tokens(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    ops = make_ops()
    set_rows(ops, SETTINGS[setting])
    for logits in (randn(16, 102400, dtype=torch.float32, scale=3.0), torch.zeros(16, 5003)):
        logits = logits.to(CUDA)
        found = []
        for limit in (MAX_CLUSTER_VOCAB, 0):
            monkeypatch.setattr("latentd_kernels.sampling.MAX_CLUSTER_VOCAB", limit)
            ops.sample(logits, 0, 16)
            found.append((ops.ring.tokens[:16].clone(), ops.ring.logprobs[:16].clone()))
        assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab", [MAX_CLUSTER_VOCAB, MAX_CLUSTER_VOCAB + 1, 524288])
def test_the_largest_vocabularies_are_sampled(vocab: int) -> None:
    torch.manual_seed(5)
    ops = make_ops()
    set_rows(ops, SETTINGS["all"])
    logits = randn(2, vocab, dtype=torch.float32, scale=3.0)
    ops.sample(logits, 0, 2)
    host = logits.cpu().numpy()
    assert ops.ring.tokens[:2].tolist() == [expected(ops, host, row) for row in range(2)]


def test_a_row_does_not_depend_on_its_batch_and_padding_rows_sample_nothing() -> None:
    torch.manual_seed(3)
    ops = make_ops()
    set_rows(ops, SETTINGS["all"])
    logits = randn(32, 5000, dtype=torch.float32, scale=2.0)
    ops.sample(logits, 0, 32)
    tokens, logprobs = ops.ring.tokens[:32].clone(), ops.ring.logprobs[:32].clone()
    for row in range(32):  # the prompt path: one logits row, parameters of a later step row
        ops.sample(logits[row:], row, 1)
        assert int(ops.ring.tokens[0]) == int(tokens[row])
        assert torch.equal(ops.ring.logprobs[:1], logprobs[row : row + 1])
    ops.inputs.slot_idx[5] = -1
    ops.sample(logits, 0, 32)
    tokens[5], logprobs[5] = -1, 0.0
    assert torch.equal(ops.ring.tokens[:32], tokens)
    assert torch.equal(ops.ring.logprobs[:32], logprobs)
    replay(lambda: ops.sample(logits, 0, 32), times=2)
    assert torch.equal(ops.ring.tokens[:32], tokens)


def test_draws_follow_the_distribution() -> None:
    ops = make_ops()
    set_rows(ops, SETTINGS["plain"])
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125], device=CUDA)
    logits = probabilities.log().repeat(512, 1)
    counts = torch.zeros(4)
    for step in range(40):
        ops.inputs.context_len.fill_(step)
        ops.sample(logits, 0, 512)
        counts += torch.bincount(ops.ring.tokens[:512].cpu(), minlength=4)
    chi_squared = (
        (counts - 20480 * probabilities.cpu()) ** 2 / (20480 * probabilities.cpu())
    ).sum()
    assert chi_squared < 16.3  # 99.9 % of fair samplers, 3 degrees of freedom
