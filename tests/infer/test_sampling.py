"""Greedy and random choice, against distributions written out by hand."""

import numpy as np
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.infer.request import Sampler, uniform
from wgpu_lora.ops.loss.sampling import NO_TOKEN, PARAMS, edit_scores, sample_tokens


def logits_of(*probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def sample(device, logits, rows):
    """The tokens that the device and the float64 reference choose, for rows of PARAMS."""
    params = np.array(rows, PARAMS).view(np.uint32).reshape(len(rows), -1)
    scores = np.tile(np.asarray(logits, np.float32), (len(rows), 1))
    constants = {"rows": len(rows), "cols": scores.shape[1]}
    call = SingleKernel(
        device, sample_tokens, {"scores": scores, "params": params, "ids": np.zeros(len(rows), np.uint32)}, constants
    )
    try:
        call.run()
        ids = call.read("ids").copy()
    finally:
        call.free()
    return ids.tolist(), sample_tokens(scores.astype(np.float64), params, None, **constants).tolist()


def chances(device, sampler, logits, draws=400):
    """How often each token is drawn, by evenly spaced draws."""
    rows = [(*sampler.row(0)[:3], (i + 0.5) / draws, *sampler.row(0)[4:]) for i in range(draws)]
    actual, reference = sample(device, logits, rows)
    assert actual == reference
    ids, counts = np.unique(actual, return_counts=True)
    return dict(zip(ids.tolist(), (counts / draws).tolist(), strict=True))


@pytest.mark.drivers
def test_temperature_zero_takes_the_first_of_the_likeliest(device):
    actual, reference = sample(device, [0.0, 3.0, 3.0, 1.0], [Sampler().row(7)])
    assert actual == reference == [1]


def test_uniform_draws_are_functions_of_seed_and_position():
    draws = np.array([[uniform(seed, position) for position in range(200)] for seed in (0, 1, -1)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert np.unique(draws).size == draws.size
    assert abs(draws.mean() - 0.5) < 0.05
    assert uniform(1, 2) == draws[1, 2]
    assert np.float32(draws[1, 2]) == draws[1, 2]
    assert uniform(42, 7) == int(0.649420079613736 * 2**24) / 2**24, "draws must never change between versions"


TWO, FIVE, FOUR = logits_of(0.2, 0.8), logits_of(0.1, 0.4, 0.2, 0.2, 0.1), logits_of(0.1, 0.5, 0.15, 0.25)


@pytest.mark.parametrize(
    ("sampler", "logits", "expected"),
    [
        (Sampler(1.0, top_k=0), TWO, {1: 0.8, 0: 0.2}),
        (Sampler(0.5, top_k=0), TWO, {1: 16 / 17, 0: 1 / 17}),
        (Sampler(2.0, top_k=0), TWO, {1: 2 / 3, 0: 1 / 3}),
        (Sampler(1e-30, top_k=0), TWO, {1: 1.0}),
        (Sampler(1.0, top_k=1), FIVE, {1: 1.0}),
        (Sampler(1.0, top_k=2), FIVE, {1: 0.5, 2: 0.25, 3: 0.25}),  # ties with the last of them stay
        (Sampler(1.0, top_k=99), FIVE, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.2, 4: 0.1}),
        (Sampler(1.0, 0, 1e-9), FOUR, {1: 1.0}),
        (Sampler(1.0, 0, 0.6), FOUR, {1: 2 / 3, 3: 1 / 3}),  # the token that reaches the sum stays
        (Sampler(1.0, 0, 0.95), FOUR, {1: 0.5, 3: 0.25, 2: 0.15, 0: 0.1}),
        (Sampler(1.0, 2, 0.6), FOUR, {1: 1.0}),  # after top-k 2 the likeliest has 2/3, so 0.6 needs it alone
        (Sampler(1.0, 0, min_p=0.29), FOUR, {1: 5 / 9, 3: 5 / 18, 2: 1 / 6}),
        (Sampler(1.0, 0, min_p=0.49), FOUR, {1: 2 / 3, 3: 1 / 3}),
        (Sampler(1.0, 0, min_p=1.0), FOUR, {1: 1.0}),
        (Sampler(1.0, 0, min_p=0.0), FOUR, {0: 0.1, 1: 0.5, 2: 0.15, 3: 0.25}),
    ],
)
def test_chances(device, sampler, logits, expected):
    actual = chances(device, sampler, logits)
    assert actual == pytest.approx(expected, abs=0.005)


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


def edited(logits, sampler, prompt, answer):
    tokens, factors, less = sampler.edits(prompt, answer)
    edits = np.stack(
        [tokens.astype(np.uint32), factors.view(np.uint32), less.view(np.uint32), 0 * tokens.astype(np.uint32)], axis=1
    )
    return edit_scores(edits, np.asarray(logits, np.float64), count=len(tokens))


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (20, 0.9, 0.0), (0, 0.8, 0.1), (12, 1.0, 0.3)])
def test_all_together_are_what_transformers_makes_of_them(device, rng, penalty, top_k, top_p, min_p):
    logits, before = 2 * rng.standard_normal(60, np.float32), rng.integers(0, 60, 25).tolist()
    sampler = Sampler(0.7, top_k, top_p, min_p=min_p, repetition_penalty=penalty)
    actual = chances(device, sampler, edited(logits, sampler, before, []), 4000)
    expected = reference_warped(logits, before, penalty, 0.7, top_k, top_p, min_p)
    assert set(actual) <= set(np.flatnonzero(expected))
    got = np.array([actual.get(token, 0) for token in range(60)])
    np.testing.assert_allclose(got, expected, atol=1 / 2000)


def test_penalties_and_biases_are_openais():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias, of OpenAI's API reference."""
    sampler = Sampler(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 2.0, 3: -1.0})
    actual = edited([1.0, 1.0, 1.0, 1.0], sampler, [0], [1, 1, 2])
    np.testing.assert_allclose(actual, [1.0, 1.0 - 0.5 - 2 * 0.25 + 2.0, 1.0 - 0.5 - 0.25, 0.0])


@pytest.mark.parametrize(
    ("penalty", "logits", "before", "expected"),
    [
        (1.0, [2.0, 1.9, -1.0], [0], 0),
        (1.2, [2.0, 1.9, -1.0], [0, 0], 1),
        (1e-30, [3e38, -3e30], [0, 1], 0),
        (1e30, [3e38, -3e30], [0, 1], 0),
    ],
)
def test_the_penalty_holds_for_greedy_choice_and_never_overflows(penalty, logits, before, expected):
    scores = edited(logits, Sampler(repetition_penalty=penalty), before, [])
    assert np.isfinite(scores).all()
    assert scores.argmax() == expected


def test_large_vocabularies_are_drawn_from_as_the_reference_does(device, rng):
    """Of 5,000 tokens, more than a histogram has bins and a workgroup has threads."""
    logits = 3 * rng.standard_normal(5003, np.float32)
    settings = ((1, 0, 1, 0), (0.8, 40, 0.9, 0), (1.5, 0, 0.5, 0.01), (0, 0, 1, 0)) * 8
    samplers = [Sampler(t, k, p, seed, m) for seed, (t, k, p, m) in enumerate(settings)]
    actual, reference = sample(device, logits, [sampler.row(3) for sampler in samplers])
    assert actual == reference


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
        ({"presence_penalty": float("nan")}, "presence penalty of nan"),
        ({"frequency_penalty": float("inf")}, "frequency penalty of inf"),
        ({"logit_bias": {3: float("inf")}}, "logit bias of inf for token 3"),
        ({"repetition_penalty": 0.0}, "repetition penalty of 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition penalty of inf"),
    ],
)
def test_impossible_parameters_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampler(**options)


@pytest.mark.drivers
@pytest.mark.parametrize("value", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_numbers_give_no_token(device, value, temperature):
    logits = [value] * 3 if value == -3e38 else [0, value, 1]
    actual, reference = sample(device, logits, [Sampler(temperature).row(0)])
    assert actual == reference == [NO_TOKEN]
