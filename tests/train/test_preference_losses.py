"""The losses of preference objectives in float64: slopes are differences of values, and nothing overflows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wgpu_lora.train.objectives import cpo, dpo, kto, orpo, preference
from wgpu_lora.train.objectives.preference import log_sigmoid, sigmoid

SIZE, STRIDE = 5, 64
CONSTANTS: dict[str, Any] = {"size": SIZE, "stride": STRIDE, "beta": 0.3}
LABELLED = {"desirable": 1.5, "undesirable": 0.5}
CASES = [
    *((dpo.dpo_scores, {"label_smoothing": 0.1, name: 1.0}) for name in dpo.LOSSES),
    (dpo.dpo_scores, {"label_smoothing": 0.1, "sigmoid": 0.8, "apo_zero": 0.2, "sft": 1.0}),
    *(
        (cpo.cpo_scores, {"label_smoothing": 0.1, "gamma": 0.5, "alpha": 0.7, "mean": name in cpo.MEANS} | flags)
        for name in cpo.LOSSES
        for flags in [{kind: kind == name for kind in ("hinge", "ipo", "simpo")}]
    ),
    (orpo.orpo_scores, {}),
    (kto.kto_scores, LABELLED),
]


def inputs(kernel: Any, rng: np.random.Generator, scale: float = 1.0) -> dict[str, np.ndarray]:
    count = 1 if kernel is kto.kto_scores else 2
    stops = np.cumsum(rng.integers(2, 9, SIZE * count)).reshape(SIZE, count)
    given = {
        "sums": -np.abs(rng.normal(size=(SIZE, count, 2))) * scale,
        "members": np.stack([stops - 2, stops], 2),
        "reference": -np.abs(rng.normal(size=(SIZE, count))) * scale,
        "group_weights": np.full(SIZE, 1 / SIZE),
        "values": np.array([1.0, -1, 1, -1, 1]),
        "shared_values": np.full(SIZE, 0.2),
    }
    outputs = {name: np.zeros(1) for name in ("slopes", "losses", "metrics")}
    return {name: (given | outputs)[name] for name in kernel.bindings}


@pytest.mark.parametrize(("kernel", "constants"), CASES)
def test_slopes_are_differences(kernel: Any, constants: dict[str, Any], rng: np.random.Generator) -> None:
    given = inputs(kernel, rng)

    def loss(sums: np.ndarray) -> float:
        return float((given["group_weights"] * kernel(**(given | {"sums": sums}), **CONSTANTS, **constants)[1]).sum())

    slopes = kernel(**given, **CONSTANTS, **constants)[0].reshape(given["sums"].shape)
    for place in np.ndindex(given["sums"].shape):
        step = np.zeros_like(given["sums"])
        step[place] = 1e-6
        difference = (loss(given["sums"] + step) - loss(given["sums"] - step)) / 2e-6
        assert slopes[place] == pytest.approx(difference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("kernel", "constants"), CASES)
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4])
def test_nothing_overflows(kernel: Any, constants: dict[str, Any], scale: float, rng: np.random.Generator) -> None:
    for values in kernel(**inputs(kernel, rng, scale), **CONSTANTS, **constants):
        assert np.isfinite(values).all()


def test_sums_and_their_weights(rng: np.random.Generator) -> None:
    """A loss of the sums changes by a token's weight; what the longer answer has more counts by ld_alpha."""
    spans, starts = np.array([[(1, 4), (5, 7)], [(0, 0), (0, 0)]]), np.array([[0, 5], [0, 0]])
    logprobs, slopes = rng.normal(size=8), rng.normal(size=(2, 2, 2))
    constants: dict[str, Any] = {"size": 2, "count": 2, "ld_alpha": 0.25}

    def loss(logprobs: np.ndarray) -> float:
        return float((slopes * preference.member_sums(logprobs, spans, starts, None, **constants)).sum())

    weights = preference.member_weights(slopes, spans, starts, np.zeros(8), **constants)
    for r in range(8):
        step = np.zeros(8)
        step[r] = 1
        assert -weights[r] == pytest.approx(loss(logprobs + step) - loss(logprobs), abs=1e-12)
    sums = preference.member_sums(logprobs, spans, starts, None, **constants)
    assert sums[0, 0, 0] == pytest.approx(logprobs[1] + logprobs[2] + 0.25 * logprobs[3])
    assert sums[0, 0, 1] == pytest.approx(logprobs[:4].sum())


def test_the_logistic_function() -> None:
    x = np.array([-1e4, -40, -1, 0, 1, 40, 1e4])
    assert log_sigmoid(x) == pytest.approx([-1e4, -40, -1.3132616875, -np.log(2), -0.3132616875, -4.248354e-18, 0])
    assert sigmoid(x) + sigmoid(-x) == pytest.approx(np.ones(7))
