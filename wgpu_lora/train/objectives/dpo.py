"""Direct preference optimization (Rafailov et al. 2023) and losses of its kind, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import F32, U32, In, Kernel, Out, ReadOnly, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.objectives.objective import Scoring
from wgpu_lora.train.objectives.preference import BY_PAIR, Pairs, Referenced, factors, log_sigmoid, sigmoid, unused_by

LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "apo_zero", "apo_down", "sft",
)  # fmt: skip
# The label smoothing of losses that divide by 1 - 2 smoothing or take logarithms of it, as far as float32 can.
SMOOTHED = {"exo_pair": (1e-9, 0.999), "robust": (0.0, 0.499)}


def dpo_losses(c: Any, r: Any, lengths: Any, nll: Any, weights: dict[str, float], beta: float, smoothing: float) -> Any:
    """The weighted sum of the losses. c, r [G]: log-ratios of chosen and rejected; lengths [G, 2]; nll [G]."""
    a, b, h = beta * c, beta * r, beta * (c - r)
    mean = c / lengths[:, 0] - r / lengths[:, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = {
            "sigmoid": -log_sigmoid(h),
            "hinge": np.maximum(0, 1 - h),
            "ipo": (mean - 1 / (2 * beta)) ** 2,
            "exo_pair": sigmoid(h) * (log_sigmoid(h) - np.log1p(-smoothing))
            + sigmoid(-h) * (log_sigmoid(-h) - np.log(smoothing)),
            "nca_pair": -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b),
            "robust": (smoothing * log_sigmoid(-h) - (1 - smoothing) * log_sigmoid(h))
            / (1 - 2 * np.float64(smoothing)),
            "sppo_hard": (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
            "apo_zero": sigmoid(-a) + sigmoid(b),
            "apo_down": sigmoid(a) + sigmoid(-h),
            "sft": nll,
        }
    return sum(weight * terms[name] for name, weight in weights.items() if weight)


def dpo_slopes(c: Any, r: Any, lengths: Any, weights: dict[str, float], beta: float, smoothing: float) -> Any:
    """The derivatives of `dpo_losses` by c and r, [G, 2], without that of nll."""
    a, b, h = beta * c, beta * r, beta * (c - r)
    mean = c / lengths[:, 0] - r / lengths[:, 1]
    bell, zeros = sigmoid(h) * sigmoid(-h), np.zeros_like(h)
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log1p(-smoothing) - np.log(smoothing)
        flipped = ((1 - smoothing) * sigmoid(-h) + smoothing * sigmoid(h)) / (1 - 2 * np.float64(smoothing))
    by_h = {  # those that depend on h only
        "sigmoid": -sigmoid(-h),
        "hinge": -1.0 * (h < 1),
        "exo_pair": bell * (h - odds),
        "robust": -flipped,
    }
    slopes = {name: (beta * slope, -beta * slope) for name, slope in by_h.items()} | {
        "ipo": tuple(2 * (mean - 1 / (2 * beta)) * sign / n for sign, n in zip((1, -1), lengths.T, strict=True)),
        "nca_pair": (beta * (0.5 * sigmoid(a) - sigmoid(-a)), 0.5 * beta * sigmoid(b)),
        "sppo_hard": (2 * (c - 0.5 / beta), 2 * (r + 0.5 / beta)),
        "apo_zero": (-beta * sigmoid(a) * sigmoid(-a), beta * sigmoid(b) * sigmoid(-b)),
        "apo_down": (beta * (sigmoid(a) * sigmoid(-a) - bell), beta * bell),
        "sft": (zeros, zeros),
    }
    return np.stack(
        [sum(weight * slopes[name][i] for name, weight in weights.items() if weight) + zeros for i in (0, 1)], 1
    )


@kernel("objectives/dpo.wgsl", **BY_PAIR)
def dpo_scores(
    sums: In, members: ReadOnly, reference: ReadOnly, group_weights: ReadOnly, shared_values: ReadOnly, slopes: Out,
    losses: Out,
    metrics: Out, *, size: U32, stride: U32, beta: F32, label_smoothing: F32, sigmoid: F32 = 0.0, hinge: F32 = 0.0,
    ipo: F32 = 0.0, exo_pair: F32 = 0.0, nca_pair: F32 = 0.0, robust: F32 = 0.0, sppo_hard: F32 = 0.0,
    apo_zero: F32 = 0.0, apo_down: F32 = 0.0, sft: F32 = 0.0,
) -> Any:  # fmt: skip
    """losses = sum of weight loss(c, r), with c and r the log-ratios to the reference (see `dpo_losses`)."""
    loss_weights = (sigmoid, hinge, ipo, exo_pair, nca_pair, robust, sppo_hard, apo_zero, apo_down, sft)
    weights = dict(zip(LOSSES, loss_weights, strict=True))
    valid = group_weights.reshape(size) != 0
    x = np.where(valid[:, None, None], sums.reshape(size, 2, 2), 0)
    ratios = x[:, :, 0] - np.where(valid[:, None], reference.reshape(size, 2), 0)
    spans = members.reshape(size, 2, 2).astype(float)
    lengths = np.maximum(1, spans[:, :, 1] - spans[:, :, 0])
    c, r = ratios.T
    shared = np.where(valid, shared_values.reshape(size), 0)
    loss = dpo_losses(c, r, lengths, -shared * x[:, 0, 1], weights, beta, label_smoothing) + np.zeros(size)
    slope = np.zeros((size, 2, 2))
    slope[:, :, 0] = dpo_slopes(c, r, lengths, weights, beta, label_smoothing)
    slope[:, 0, 1] = -sft * shared
    logged = np.zeros((6, stride))
    logged[:, :size] = valid * [beta * c, beta * r, c > r, beta * (c - r), x[:, 0, 0], x[:, 1, 0]]
    factor = np.where(valid, group_weights.reshape(size), 0)[:, None, None]
    return np.where(factor != 0, factor * slope, 0), np.where(valid, loss, 0), logged


@dataclass(frozen=True)
class DPO(Referenced, Pairs):
    """A loss of how much more the policy prefers the chosen answer than the reference does, or a weighted sum of such
    losses and the chosen answers' negative log-likelihood (`sft`), as in MPO (Wang et al. 2024)."""

    reference: ClassVar[bool] = True

    loss_type: str | None = None
    loss_weights: str | None = None
    label_smoothing: float = 0.0
    ld_alpha: float | None = None

    def __post_init__(self) -> None:
        _ = self.losses

    @cached_property
    def losses(self) -> dict[str, float]:
        """The weights of the losses, by name. Raises UserError."""
        names = [name.strip() for name in (self.loss_type or LOSSES[0]).split(",")]
        for name in names:
            if name not in LOSSES:
                raise UserError(
                    f"{flag('loss_type')} must be one or several of {', '.join(LOSSES)} for "
                    f"{setting('objective', 'dpo')}, not {name!s:.80}."
                )
            if names.count(name) > 1:
                raise UserError(f"{flag('loss_type')} has {name!r} twice: leave one out.")
        weights = [1.0] * len(names) if self.loss_weights is None else self._weights(self.loss_weights)
        if len(weights) != len(names):
            raise UserError(
                f"{flag('loss_weights')} has {len(weights)} numbers, but {flag('loss_type')} {len(names)} losses: give "
                "one for each."
            )
        for name, (minimum, maximum) in SMOOTHED.items():
            if name in names and not minimum <= self.label_smoothing <= maximum:
                raise UserError(
                    f"{setting('loss_type', name)} needs a {flag('label_smoothing')} of at least {minimum:g} and at "
                    f"most {maximum:g}, not {self.label_smoothing:g}."
                )
        return dict(zip(names, weights, strict=True))

    @staticmethod
    def _weights(text: str) -> list[float]:
        try:
            result = [float(part) for part in text.split(",")]
            if not all(0 <= weight < 1e30 for weight in result) or not any(result):
                raise ValueError
        except ValueError:
            raise UserError(
                f"{flag('loss_weights')} must be numbers of at least 0, not all 0, with commas, not {text!r:.80}."
            ) from None
        return result

    def idle(self) -> dict[str, str]:
        return (
            {} if SMOOTHED.keys() & self.losses.keys() else {"label_smoothing": unused_by(self.loss_type or LOSSES[0])}
        )

    @property
    def verbose_weight(self) -> float:
        return 1.0 if self.ld_alpha is None else self.ld_alpha

    def sums(self, logprobs: Sequence[np.ndarray]) -> tuple[float, ...]:
        spans = np.array([(0, len(values)) for values in logprobs])
        return tuple(float(f @ v) for f, v in zip(factors(spans, self.verbose_weight), logprobs, strict=True))

    def kernel(self) -> Kernel:
        return dpo_scores

    def inputs(self, sums: Tensor, scoring: Scoring) -> list[Tensor]:
        groups = scoring.groups
        assert groups is not None
        assert groups.reference is not None
        return [sums, groups.members, groups.reference, groups.weights, groups.shared]

    def constants(self) -> dict[str, Any]:
        zeros = dict.fromkeys(LOSSES, 0.0)
        return {"beta": self.beta, "label_smoothing": self.label_smoothing, **zeros, **self.losses}
