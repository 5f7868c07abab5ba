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


def test_temperature_sharpens_and_flattens():
    logits = logits_of(0.2, 0.8)
    assert chances(Sampler(1.0, top_k=0), logits) == {1: 0.8, 0: 0.2}
    assert chances(Sampler(0.5, top_k=0), logits) == pytest.approx({1: 16 / 17, 0: 1 / 17}, abs=1e-6)
    assert chances(Sampler(2.0, top_k=0), logits) == pytest.approx({1: 2 / 3, 0: 1 / 3}, abs=1e-6)
    assert chances(Sampler(1e-30, top_k=0), logits) == {1: 1.0, 0: 0.0}


def test_top_k_keeps_the_likeliest_and_ties_with_the_last_of_them():
    logits = logits_of(0.1, 0.4, 0.2, 0.2, 0.1)
    assert chances(Sampler(1.0, top_k=1), logits) == {1: 1.0}
    assert chances(Sampler(1.0, top_k=2), logits) == {1: 0.5, 2: 0.25, 3: 0.25}
    assert chances(Sampler(1.0, top_k=99), logits) == chances(Sampler(1.0, top_k=0), logits)


def test_top_p_keeps_the_token_that_reaches_the_sum():
    logits = logits_of(0.1, 0.5, 0.15, 0.25)
    assert chances(Sampler(1.0, 0, 1e-9), logits) == {1: 1.0}
    assert chances(Sampler(1.0, 0, 0.6), logits) == pytest.approx({1: 2 / 3, 3: 1 / 3}, abs=1e-6)
    assert list(chances(Sampler(1.0, 0, 0.95), logits)) == [1, 3, 2, 0]


def test_top_p_counts_what_top_k_left():
    # after top-k 2 the likeliest has 2/3, so 0.6 needs it alone
    assert chances(Sampler(1.0, 2, 0.6), logits_of(0.1, 0.5, 0.15, 0.25)) == {1: 1.0}


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
    ],
)
def test_impossible_parameters_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampler(**options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused(value):
    with pytest.raises(UserError, match="not finite"):
        Sampler()(np.array([0, value, 1], np.float32), 0)
