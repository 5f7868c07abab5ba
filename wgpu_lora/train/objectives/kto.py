"""Kahneman-Tversky optimization (Ethayarajh et al. 2024): answers with a label, as in TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.data.preference_formats import LABELLED
from wgpu_lora.gpu.kernel import F32, U32, In, Kernel, Out, ReadOnly, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.train.objectives.objective import Scoring
from wgpu_lora.train.objectives.preference import BY_GROUP, Referenced, one_loss, sigmoid

LOSSES = ("kto", "apo_zero_unpaired")
LABELS = ("chosen", "rejected")  # what TRL's names call desirable and undesirable answers
BY_LABEL = tuple(f"{kind}/{label}" for kind in ("rewards", "logps", "count") for label in LABELS)


def kto_losses(x: Any, kl: Any, desirable: Any, beta: float, weights: tuple[float, float]) -> Any:
    """weight sigmoid(-beta (x - kl)) of desirable answers, weight sigmoid(beta (x - kl)) of others; x: log-ratios."""
    return np.where(desirable, weights[0] * sigmoid(-beta * (x - kl)), weights[1] * sigmoid(beta * (x - kl)))


@kernel("objectives/kto.wgsl", **BY_GROUP)
def kto_scores(
    sums: In, reference: ReadOnly, group_weights: ReadOnly, values: ReadOnly, shared_values: ReadOnly, slopes: Out,
    losses: Out,
    metrics: Out, *, size: U32, stride: U32, beta: F32, desirable: F32, undesirable: F32,
) -> Any:  # fmt: skip
    """losses = `kto_losses` of the log-ratio to the reference, given the KL term in shared_values."""
    factor = group_weights.reshape(size)
    valid, good = factor != 0, values.reshape(size) > 0
    logps = np.where(valid, sums.reshape(size, 2)[:, 0], 0)
    x, kl = logps - np.where(valid, reference.reshape(size), 0), np.where(valid, shared_values.reshape(size), 0)
    loss = kto_losses(x, kl, good, beta, (desirable, undesirable))
    h = beta * (x - kl)
    slope = np.zeros((size, 2))
    weight = np.where(good, -desirable, undesirable)
    slope[:, 0] = np.where(valid, factor * weight * beta * sigmoid(h) * sigmoid(-h), 0)
    logged = np.zeros((7, stride))
    logged[6, :size] = kl
    for i, value in enumerate((beta * x, logps, np.ones(size))):
        for j, mask in enumerate((good, ~good)):
            logged[2 * i + j, :size] = np.where(valid & mask, value, 0)
    return slope, np.where(valid, loss, 0), logged


@dataclass(frozen=True)
class KTO(Referenced):
    """A loss of single answers: a good one should be more likely than under the reference, by more than the policy is
    from the reference anyway (the KL term), a bad one less likely.

    As in TRL, the KL term is the mean log-ratio of mismatched answers, each prompt of a step with the answer of the
    sample before it, without a gradient, and at least 0.
    """

    formats: ClassVar = LABELLED
    reference: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*BY_LABEL, "kl")

    loss_type: str | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        one_loss(self.loss_type, LOSSES, "kto")

    @property
    def needs_kl_rows(self) -> bool:
        return one_loss(self.loss_type, LOSSES, "kto") == "kto"

    def estimate(self, policy: Sequence[float], reference: Sequence[float]) -> float:
        return max(0.0, float(np.mean(np.subtract(policy, reference))))

    def logged(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """Means over the answers with each label, for labels that there are, and their difference."""
        result = {name: value / units for name, value in totals.items() if name not in BY_LABEL}
        for label in LABELS:
            count = totals[f"count/{label}"]
            result |= {f"{kind}/{label}": totals[f"{kind}/{label}"] / count for kind in ("rewards", "logps") if count}
        if all(f"rewards/{label}" in result for label in LABELS):
            result["rewards/margins"] = result["rewards/chosen"] - result["rewards/rejected"]
        return result

    def kernel(self) -> Kernel:
        return kto_scores

    def inputs(self, sums: Tensor, scoring: Scoring) -> list[Tensor]:
        groups = scoring.groups
        assert groups is not None
        assert groups.reference is not None
        return [sums, groups.reference, groups.weights, groups.values, groups.shared]

    def constants(self) -> dict[str, Any]:
        return {"beta": self.beta, "desirable": self.desirable_weight, "undesirable": self.undesirable_weight}
