"""Odds ratio preference optimization (Hong et al. 2024), as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, Kernel, Out, ReadOnly, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.train.objectives.objective import Scoring
from wgpu_lora.train.objectives.preference import BY_PAIR, PAIR_METRICS, Pairs, log_sigmoid, sigmoid

LEAST = 1e-7  # of 1 - p, as in the shader


def log_odds(logps: Any) -> Any:
    """The log odds ratio of the chosen answer and the rejected one, given their mean log-probabilities [G, 2]."""
    complement = np.maximum(-np.expm1(logps), LEAST)
    return (logps[:, 0] - logps[:, 1]) - (np.log(complement[:, 0]) - np.log(complement[:, 1]))


@kernel("objectives/orpo.wgsl", **BY_PAIR)
def orpo_scores(
    sums: In, members: ReadOnly, group_weights: ReadOnly, shared_values: ReadOnly, slopes: Out, losses: Out,
    metrics: Out, *,
    size: U32, stride: U32, beta: F32,
) -> Any:  # fmt: skip
    """losses = nll - beta log sigmoid(z), with z the log odds ratio and nll the chosen row's share of the mean."""
    factor = group_weights.reshape(size)
    valid = factor != 0
    x = np.where(valid[:, None, None], sums.reshape(size, 2, 2), -1)
    spans = members.reshape(size, 2, 2).astype(float)
    rate = 1 / np.maximum(1, spans[:, :, 1] - spans[:, :, 0])
    logps, shared = np.minimum(0, rate * x[:, :, 0]), np.where(valid, shared_values.reshape(size), 0)
    z, nll = log_odds(logps), -shared * x[:, 0, 1]
    slope = np.zeros((size, 2, 2))
    slope[:, :, 0] = (-beta * sigmoid(-z))[:, None] / np.maximum(-np.expm1(logps), LEAST) * (1, -1) * rate
    slope[:, 0, 1] = -shared
    logged = np.zeros((9, stride))
    difference = logps[:, 0] - logps[:, 1]
    logged[:, :size] = valid * np.stack(
        [*(beta * logps.T), difference > 0, beta * difference, *logps.T, nll, log_sigmoid(z), z]
    )
    weighted = np.where(valid[:, None, None], factor[:, None, None] * slope, 0)
    return weighted, valid * (nll - beta * log_sigmoid(z)), logged


@dataclass(frozen=True)
class ORPO(Pairs):
    """The mean negative log-likelihood of the chosen rows' tokens, prompts included, plus `beta` times a loss of the
    answers' odds ratio, without a reference."""

    trains_prompt: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def kernel(self) -> Kernel:
        return orpo_scores

    def inputs(self, sums: Tensor, scoring: Scoring) -> list[Tensor]:
        groups = scoring.groups
        assert groups is not None
        return [sums, groups.members, groups.weights, groups.shared]

    def constants(self) -> dict[str, Any]:
        return {"beta": self.beta}
