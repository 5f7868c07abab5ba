"""Contrastive preference optimization (Xu et al. 2024), and SimPO (Meng et al. 2024), as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Flag, In, Kernel, Out, ReadOnly, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.train.objectives.objective import Scoring
from wgpu_lora.train.objectives.preference import (
    BY_PAIR,
    PAIR_METRICS,
    Pairs,
    log_sigmoid,
    one_loss,
    sigmoid,
    unused_by,
)

LOSSES = ("sigmoid", "hinge", "ipo", "simpo")
MEANS = ("ipo", "simpo")  # of mean log-probabilities instead of sums


def cpo_losses(difference: Any, loss_type: str, beta: float, smoothing: float, gamma: float) -> Any:
    """The loss of a difference of log-probabilities, without the negative log-likelihood."""
    h = beta * difference - (gamma if loss_type == "simpo" else 0.0)
    if loss_type == "hinge":
        return np.maximum(0, 1 - h)
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)


def cpo_slopes(difference: Any, loss_type: str, beta: float, smoothing: float, gamma: float) -> Any:
    """The derivative of `cpo_losses` by the difference."""
    h = beta * difference - (gamma if loss_type == "simpo" else 0.0)
    if loss_type == "hinge":
        return -beta * (h < 1)
    if loss_type == "ipo":
        return 2 * (difference - 1 / (2 * beta))
    return beta * (smoothing * sigmoid(h) - (1 - smoothing) * sigmoid(-h))


@kernel("objectives/cpo.wgsl", **BY_PAIR)
def cpo_scores(
    sums: In, members: ReadOnly, group_weights: ReadOnly, shared_values: ReadOnly, slopes: Out, losses: Out,
    metrics: Out, *,
    size: U32, stride: U32, beta: F32, label_smoothing: F32, gamma: F32, alpha: F32, mean: Flag = False,
    hinge: Flag = False, ipo: Flag = False, simpo: Flag = False,
) -> Any:  # fmt: skip
    """losses = `cpo_losses` of the answers' log-probabilities + alpha nll, the chosen answer's share of the mean."""
    kind = "hinge" if hinge else "ipo" if ipo else "simpo" if simpo else "sigmoid"
    factor = group_weights.reshape(size)
    valid = factor != 0
    x = np.where(valid[:, None, None], sums.reshape(size, 2, 2), 0)
    spans = members.reshape(size, 2, 2).astype(float)
    rate = 1 / np.maximum(1, spans[:, :, 1] - spans[:, :, 0]) if mean else np.ones((size, 2))
    logps, shared = rate * x[:, :, 0], np.where(valid, shared_values.reshape(size), 0)
    difference, nll = logps[:, 0] - logps[:, 1], -shared * x[:, 0, 1]
    arguments = difference, kind, beta, label_smoothing, gamma
    slope = np.zeros((size, 2, 2))
    slope[:, :, 0] = cpo_slopes(*arguments)[:, None] * rate * (1, -1)
    slope[:, 0, 1] = -alpha * shared
    logged = np.zeros((7, stride))
    logged[:, :size] = valid * np.stack([*(beta * logps.T), difference > 0, beta * difference, *logps.T, nll])
    return (
        np.where(valid[:, None, None], factor[:, None, None] * slope, 0),
        valid * (cpo_losses(*arguments) + alpha * nll),
        logged,
    )


@dataclass(frozen=True)
class CPO(Pairs):
    """A loss of how much likelier the chosen answer is than the rejected one, without a reference, plus `cpo_alpha`
    times the mean negative log-likelihood of the chosen answers' tokens."""

    metrics: ClassVar[tuple[str, ...]] = (*PAIR_METRICS, "nll_loss")

    loss_type: str | None = None
    label_smoothing: float = 0.0
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5

    def __post_init__(self) -> None:
        one_loss(self.loss_type, LOSSES, "cpo")

    def idle(self) -> dict[str, str]:
        loss = one_loss(self.loss_type, LOSSES, "cpo")
        names = ["simpo_gamma"] if loss != "simpo" else []
        names += ["label_smoothing"] if loss not in ("sigmoid", "simpo") else []
        return dict.fromkeys(names, unused_by(loss))

    def kernel(self) -> Kernel:
        return cpo_scores

    def inputs(self, sums: Tensor, scoring: Scoring) -> list[Tensor]:
        groups = scoring.groups
        assert groups is not None
        return [sums, groups.members, groups.weights, groups.shared]

    def constants(self) -> dict[str, Any]:
        loss_type = one_loss(self.loss_type, LOSSES, "cpo")
        options = {"gamma": self.simpo_gamma, "alpha": self.cpo_alpha, "label_smoothing": self.label_smoothing}
        flags = {name: loss_type == name for name in ("hinge", "ipo", "simpo")}
        return {"beta": self.beta, **options, "mean": loss_type in MEANS, **flags}
