from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from latentd_kernels.reference.sampling import (
    WEIGHT_ONE,
    ReferenceSampling,
    draw,
    log_probability,
    philox4x32,
    random_bits,
    token_weights,
)
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

FIRST, LAST = 0, (1 << 64) - 1  # the smallest and the largest random number


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers published with Random123
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_philox_gives_the_published_words(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == tuple(int(w, 16) for w in words.split())


def test_the_random_number_is_the_first_two_words_at_the_position() -> None:
    seed = 0x299F31D0A4093822
    words = philox4x32((77, 0, 0, 0), (0xA4093822, 0x299F31D0))
    assert random_bits(seed, 77) == words[0] + (words[1] << 32)


def test_weights_are_rounded_multiples_of_two_to_the_minus_40() -> None:
    weights = token_weights(np.array([0, -1, -30, np.nan, -np.inf], dtype=np.float32), 1.0)
    assert weights.tolist() == [
        WEIGHT_ONE, pytest.approx(WEIGHT_ONE / math.e, rel=1e-6), 0, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_without_a_temperature_the_best_of_the_lowest_id_is_taken(temperature: float) -> None:
    row = np.array([np.nan, 1, 3, 3, -np.inf], dtype=np.float32)
    assert draw(row, temperature, 0, 1.0, 0.0, LAST) == 2


def test_nan_is_taken_only_when_all_are_nan() -> None:
    assert draw(np.full(4, np.nan, np.float32), 0.0, 0, 1.0, 0.0, LAST) == 0
    assert draw(np.full(4, np.nan, np.float32), 1.0, 0, 1.0, 0.0, LAST) == 0
    assert draw(np.array([np.nan, -np.inf], np.float32), 1.0, 0, 1.0, 0.0, LAST) == 1


def test_plus_and_minus_zero_are_equal() -> None:
    assert draw(np.array([-0.0, 0.0], np.float32), 0.0, 0, 1.0, 0.0, FIRST) == 0
    assert draw(np.array([0.0, -0.0], np.float32), 1.0, 1, 1.0, 0.0, LAST) == 0


def test_the_draw_goes_through_ids_in_ascending_order() -> None:
    row = logits_of(0.125, 0.5, 0.375)
    shares = [
        draw(row, 1.0, 0, 1.0, 0.0, int(u * 2**64)) for u in (0, 0.12, 0.13, 0.62, 0.63, 0.99)
    ]
    assert shares == [0, 0, 1, 1, 2, 2]


def test_top_k_keeps_k_and_the_lower_ids_of_a_tie() -> None:
    row = np.array([1, 2, 1, 1, 2, 1], dtype=np.float32)
    kept = {draw(row, 1.0, 4, 1.0, 0.0, u << 54) for u in range(1024)}
    assert kept == {0, 1, 2, 4}


def test_top_k_of_one_is_greedy_and_a_large_one_is_off() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        row = rng.normal(size=40).astype(np.float32)
        bits = int(rng.integers(0, 1 << 63)) * 2
        assert draw(row, 1.3, 1, 1.0, 0.0, bits) == int(row.argmax())
        assert draw(row, 1.3, 40, 1.0, 0.0, bits) == draw(row, 1.3, 0, 1.0, 0.0, bits)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, {1}),
        (0.5, {1}),
        (0.51, {1, 2}),
        (0.75, {1, 2}),
        (0.76, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: set[int]) -> None:
    row = logits_of(0.125, 0.5, 0.25, 0.125)
    assert {draw(row, 1.0, 0, top_p, 0.0, u << 54) for u in range(1024)} == kept


def test_top_p_counts_only_what_top_k_left() -> None:
    row = logits_of(0.4, 0.2, 0.2, 0.2)
    assert {draw(row, 1.0, 2, 0.66, 0.0, u << 54) for u in range(1024)} == {0}
    assert {draw(row, 1.0, 2, 0.68, 0.0, u << 54) for u in range(1024)} == {0, 1}


@pytest.mark.parametrize(("min_p", "kept"), [(0.24, {0, 1, 2}), (0.26, {0, 1}), (1.0, {0})])
def test_min_p_is_relative_to_the_best(min_p: float, kept: set[int]) -> None:
    row = logits_of(0.5, 0.25, 0.125, 0.0625)
    assert {draw(row, 1.0, 0, 1.0, min_p, u << 54) for u in range(1024)} == kept


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    row = np.array([-3e38, 5, 3e38, 4], dtype=np.float32)
    assert {draw(row, temperature, 0, 1.0, 0.0, u << 60) for u in range(16)} == {2}


def test_draws_follow_the_tempered_distribution() -> None:
    row = np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32)
    counts = np.zeros(4)
    for position in range(4000):
        counts[draw(row, 2.0, 0, 1.0, 0.0, random_bits(12345, position))] += 1
    expected = np.exp(row / 2) / np.exp(row / 2).sum() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 99.9 %, 3 degrees of freedom


def test_log_probability_is_that_of_the_untempered_softmax() -> None:
    row = np.random.default_rng(2).normal(size=500).astype(np.float32) * 4
    expected = torch.log_softmax(torch.from_numpy(row).double(), 0)
    for token in (0, 250, 499):
        assert log_probability(row, token) == pytest.approx(float(expected[token]), abs=1e-5)


def test_sample_reads_the_parameters_of_its_step_rows_and_skips_padding() -> None:
    layout, cpu = RingLayout(max_rows=4, max_updates=1, max_zero_pages=1), torch.device("cpu")
    ops = ReferenceSampling(allocate_inputs(layout, 4, 4, cpu), StepRing(layout, cpu), "f32")
    inputs = ops.inputs
    inputs.slot_idx[:] = torch.tensor([0, -1, 2, 3])
    inputs.temperature[2] = 1.0
    inputs.seed[2] = -5  # the bits of a large unsigned seed
    inputs.context_len[2] = 9
    logits = torch.randn(2, 300)
    ops.sample(logits, 1, 2)
    row = logits[1].numpy()
    expected = draw(row, 1.0, 0, 1.0, 0.0, random_bits((1 << 64) - 5, 9))
    assert ops.ring.tokens[:2].tolist() == [-1, expected]
    assert ops.ring.logprobs[:2].tolist() == pytest.approx([0.0, log_probability(row, expected)])
