"""The common parts of preference objectives: their rows and options, and how their kernels are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.data import Row
from wgpu_lora.data.preference_formats import PAIRS
from wgpu_lora.data.tokenized_data import Cut
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Kernel, Out, ReadOnly, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.tensor import Tensor, align
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.objectives.objective import GroupTensors, Objective, Score, Scoring

PAIR_METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
)  # fmt: skip
# Of the kernels that compute a loss for each group: `stride` is the number of groups, rounded up so that the metrics,
# f32 [metrics, stride], are tensors at aligned offsets.
BY_GROUP: dict[str, Any] = {"grid": lambda c: linear_grid(c.stride), "lib": ("linear", "logistic")}
BY_PAIR: dict[str, Any] = {**BY_GROUP, "lib": (*BY_GROUP["lib"], "pairs")}


@dataclass(frozen=True)
class Preference(Objective):
    """An objective whose unit is the group, and whose loss depends on the sums of log-probabilities of its answers."""

    unit: ClassVar = "group"
    learning_rate: ClassVar = 1e-5  # of adapters; docs/preferences.md has what was measured

    @classmethod
    def default_rate(cls, width: int) -> float:
        return cls.learning_rate

    beta: float = 0.1
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"

    def cut(self) -> Cut:
        return Cut(self.max_prompt_length, self.max_completion_length, self.truncation_mode)

    @property
    def verbose_weight(self) -> float:
        """The factor of what an answer has more than the other (`ld_alpha`)."""
        return 1.0

    def score(self, rec: Recorder, logprobs: Tensor, scoring: Scoring) -> Score:
        groups = scoring.groups
        assert groups is not None
        sums = record_sums(rec, logprobs, groups, self.verbose_weight)
        size, names = groups.weights.size, type(self).metrics
        stride = align(4 * size) // 4
        slopes, losses = rec.temp(sums.shape, name="slopes"), rec.temp((size,), name="losses")
        metrics = rec.temp((len(names), stride), name="metrics")
        inputs = self.inputs(sums, scoring)
        rec.dispatch(self.kernel(), *inputs, slopes, losses, metrics, size=size, stride=stride, **self.constants())
        weights = record_weights(rec, slopes, logprobs.shape, groups, self.verbose_weight)
        logged = {name: metrics.rows(i, i + 1).reshape(stride) for i, name in enumerate(names)}
        return Score(weights, losses, logged)

    def kernel(self) -> Kernel:
        """Computes slopes f32 [G, members, 2] by the sums (times the group's weight), losses [G] and metrics."""
        raise NotImplementedError

    def inputs(self, sums: Tensor, scoring: Scoring) -> list[Tensor]:
        """The kernel's inputs."""
        raise NotImplementedError

    def constants(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Pairs(Preference):
    """Chosen and rejected answers to a prompt."""

    formats: ClassVar = PAIRS
    rows_per_sample: ClassVar[int] = 2
    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def shared(self, samples: Sequence[Sequence[Row]]) -> float:
        """Pairs per token of the chosen rows, which turns sums over tokens into the mean over the tokens of a step."""
        tokens = sum(
            len(chosen.input_ids) - 1 if self.trains_prompt else chosen.trained_tokens for chosen, _ in samples
        )
        return len(samples) / max(1, tokens)


def unused_by(loss_type: str) -> str:
    return f"{setting('loss_type', loss_type)} does not use it"


def one_loss(loss_type: str | None, choices: Mapping[str, str] | Sequence[str], objective: str) -> str:
    """The loss type of an objective that takes one; the first by default. Raises UserError."""
    loss = loss_type or next(iter(choices))
    if loss not in choices:
        raise UserError(
            f"{flag('loss_type')} must be one of {', '.join(choices)} for {setting('objective', objective)}, not "
            f"{loss!s:.80}."
        )
    return loss


@dataclass(frozen=True)
class Referenced(Preference):
    """reference_adapter: the reference; by default the base model alone."""

    reference_adapter: str | None = None
    precompute_ref_log_probs: bool = False

    @property
    def reference_path(self) -> str | None:
        return self.reference_adapter

    @property
    def precomputes(self) -> bool:
        return self.precompute_ref_log_probs


ROWS: dict[str, Any] = {"grid": row_grid(lambda c: c.size * c.count), "variants": by_subgroup}


def factors(members: np.ndarray, ld_alpha: float) -> list[np.ndarray]:
    """The factor of each log-probability of a group's answers, [start, stop) each: 1 up to the length that all answers
    have, ld_alpha behind it (LD-DPO, Liu et al. 2024)."""
    lengths = [int(stop - start) for start, stop in members]
    return [np.where(np.arange(length) < min(lengths), 1.0, ld_alpha) for length in lengths]


@kernel("objectives/member_sums.wgsl.j2", **ROWS)
def member_sums(
    logprobs: In, members: ReadOnly, starts: ReadOnly, sums: Out, *, size: U32, count: U32, ld_alpha: F32 = 1.0
) -> Any:
    """sums = (sum of factor logprobs over the answer, sum of logprobs over all targets) of each segment."""
    spans, result = members.reshape(size, count, 2).astype(int), np.zeros((size, count, 2))
    for g in range(size):
        for m, factor in enumerate(factors(spans[g], ld_alpha)):
            (first, stop), start = spans[g, m], int(starts.reshape(size, count)[g, m])
            result[g, m] = (factor * logprobs[first:stop]).sum(), logprobs[start:stop].sum()
    return result


@kernel("objectives/member_weights.wgsl.j2", **ROWS)
def member_weights(
    slopes: In, members: ReadOnly, starts: ReadOnly, weights: InOut, *, size: U32, count: U32, ld_alpha: F32 = 1.0
) -> Any:
    """weights = -(factor slopes.x + slopes.y) in each segment, the first term for its answer only."""
    spans, weights = members.reshape(size, count, 2).astype(int), weights.copy()
    slopes = slopes.reshape(size, count, 2)
    for g in range(size):
        for m, factor in enumerate(factors(spans[g], ld_alpha)):
            (first, stop), start = spans[g, m], int(starts.reshape(size, count)[g, m])
            weights[start:stop] = -slopes[g, m, 1]
            weights[first:stop] -= factor * slopes[g, m, 0]
    return weights


def record_sums(rec: Recorder, logprobs: Tensor, groups: GroupTensors, ld_alpha: float = 1.0) -> Tensor:
    """Record `member_sums`, f32 [G, members, 2]."""
    size, members, _ = groups.members.shape
    sums = rec.temp((size, members, 2), name="member sums")
    shape: dict[str, Any] = {"size": size, "count": members, "ld_alpha": ld_alpha}
    rec.dispatch(member_sums, logprobs, groups.members, groups.starts, sums, **shape)
    return sums


def record_weights(
    rec: Recorder, slopes: Tensor, shape: Sequence[int], groups: GroupTensors, ld_alpha: float = 1.0
) -> Tensor:
    """Record the weights of R tokens from derivatives by `record_sums`, f32 [G, members, 2]."""
    size, members, _ = groups.members.shape
    weights = rec.temp(tuple(shape), name="weights")
    rec.dispatch(fill, weights, size=weights.size)
    constants: dict[str, Any] = {"size": size, "count": members, "ld_alpha": ld_alpha}
    rec.dispatch(member_weights, slopes, groups.members, groups.starts, weights, **constants)
    return weights


def log_sigmoid(x: Any) -> Any:
    """log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(0, -x)


def sigmoid(x: Any) -> Any:
    return np.exp(log_sigmoid(x))
