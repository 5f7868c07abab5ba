"""Greedy and random choice, against distributions written out by hand."""

import numpy as np
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.infer.sampling import Sampler, uniform


def logits_of(*probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def chances(sampler, logits):
    ids, probabilities = sampler.distribution(logits)
    return dict(zip(ids.tolist(), probabilities.round(6).tolist(), strict=True))


@pytest.mark.drivers
def test_temperature_zero_takes_the_first_of_the_likeliest():
    assert Sampler()(np.array([0.0, 3.0, 3.0, 1.0], np.float32), position=7) == 1


def test_uniform_draws_are_functions_of_seed_and_position():
    draws = np.array([[uniform(seed, position) for position in range(200)] for seed in (0, 1, -1)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert np.unique(draws).size == draws.size
    assert abs(draws.mean() - 0.5) < 0.05
    assert uniform(1, 2) == draws[1, 2]
    assert uniform(42, 7) == 0.649420079613736, "draws must never change between versions"


TWO, FIVE, FOUR = logits_of(0.2, 0.8), logits_of(0.1, 0.4, 0.2, 0.2, 0.1), logits_of(0.1, 0.5, 0.15, 0.25)


@pytest.mark.parametrize(
    ("sampler", "logits", "expected"),
    [
        (Sampler(1.0, top_k=0), TWO, {1: 0.8, 0: 0.2}),
        (Sampler(0.5, top_k=0), TWO, {1: 16 / 17, 0: 1 / 17}),
        (Sampler(2.0, top_k=0), TWO, {1: 2 / 3, 0: 1 / 3}),
        (Sampler(1e-30, top_k=0), TWO, {1: 1.0, 0: 0.0}),
        (Sampler(1.0, top_k=1), FIVE, {1: 1.0}),
        (Sampler(1.0, top_k=2), FIVE, {1: 0.5, 2: 0.25, 3: 0.25}),  # ties with the last of them stay
        (Sampler(1.0, top_k=99), FIVE, chances(Sampler(1.0, top_k=0), FIVE)),
        (Sampler(1.0, 0, 1e-9), FOUR, {1: 1.0}),
        (Sampler(1.0, 0, 0.6), FOUR, {1: 2 / 3, 3: 1 / 3}),  # the token that reaches the sum stays
        (Sampler(1.0, 0, 0.95), FOUR, {1: 0.5, 3: 0.25, 2: 0.15, 0: 0.1}),
        (Sampler(1.0, 2, 0.6), FOUR, {1: 1.0}),  # after top-k 2 the likeliest has 2/3, so 0.6 needs it alone
        (Sampler(1.0, 0, min_p=0.29), FOUR, {1: 5 / 9, 3: 5 / 18, 2: 1 / 6}),
        (Sampler(1.0, 0, min_p=0.49), FOUR, {1: 2 / 3, 3: 1 / 3}),
        (Sampler(1.0, 0, min_p=1.0), FOUR, {1: 1.0}),
        (Sampler(1.0, 0, min_p=0.0), FOUR, chances(Sampler(1.0, 0), FOUR)),
    ],
)
def test_chances(sampler, logits, expected):
    found = chances(sampler, logits)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-6)


def reference_warped(logits, before, penalty, temperature, top_k, top_p, min_p):
    """transformers' processors in float64, one after the other, as their documentation has them."""
    scores = logits.astype(np.float64)
    for token in set(before):
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    scores = scores / temperature

    def softmax(values):
        weights = np.exp(values - values.max())
        return weights / weights.sum()

    if top_k:
        scores = np.where(scores < np.sort(scores)[-min(top_k, scores.size)], -np.inf, scores)
    ascending = np.argsort(scores)
    removed = np.cumsum(softmax(scores)[ascending]) <= 1 - top_p
    removed[-1] = False
    scores[ascending[removed]] = -np.inf
    probabilities = softmax(scores)
    scores[probabilities < min_p * probabilities.max()] = -np.inf
    return softmax(scores)


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (20, 0.9, 0.0), (0, 0.8, 0.1), (12, 1.0, 0.3)])
def test_all_together_are_what_transformers_makes_of_them(rng, penalty, top_k, top_p, min_p):
    logits, before = 2 * rng.standard_normal(60, np.float32), rng.integers(0, 60, 25).tolist()
    sampler = Sampler(0.7, top_k, top_p, min_p=min_p, repetition_penalty=penalty)
    ids, found = sampler.distribution(sampler.penalised(logits, before))
    expected = reference_warped(logits, before, penalty, 0.7, top_k, top_p, min_p)
    assert set(ids) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(found, expected[ids], rtol=1e-9)


@pytest.mark.parametrize(
    ("temperature", "penalty", "logits", "before", "chosen"),
    [
        (0.0, 1.0, [2.0, 1.9, -1.0], [0], 0),
        (0.0, 1.2, [2.0, 1.9, -1.0], [0, 0], 1),
        (0.0, 1e-300, [3e38, -3e38], [0, 1], 0),
        (1.0, 1e-300, [3e38, -3e38], [0, 1], 0),
        (1.0, 1e300, [3e38, -3e38], [0, 1], 0),
    ],
)
def test_the_penalty_holds_for_greedy_choice_and_never_overflows(temperature, penalty, logits, before, chosen):
    assert Sampler(temperature, repetition_penalty=penalty)(np.array(logits, np.float32), 0, before) == chosen


def test_frequencies_follow_the_distribution():
    logits, sampler = logits_of(0.1, 0.5, 0.15, 0.25), Sampler(1.0, seed=3)
    counts = np.bincount([sampler(logits, position) for position in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.1, 0.5, 0.15, 0.25], atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature of -1.0"),
        ({"temperature": float("nan")}, "temperature of nan"),
        ({"top_k": -1}, "top-k of -1"),
        ({"top_p": 0.0}, "top-p of 0.0"),
        ({"top_p": 1.5}, "top-p of 1.5"),
        ({"min_p": -0.1}, "min-p of -0.1"),
        ({"min_p": float("nan")}, "min-p of nan"),
        ({"repetition_penalty": 0.0}, "repetition penalty of 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition penalty of inf"),
    ],
)
def test_impossible_parameters_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampler(**options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused(value):
    with pytest.raises(UserError, match="not finite"):
        Sampler()(np.array([0, value, 1], np.float32), 0)
