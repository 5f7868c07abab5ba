"""Group relative policy optimization (Shao et al. 2024) and losses of its kind, as in TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.data.example_formats import PROMPTS
from wgpu_lora.data.tokenized_data import KEEP_END, Cut
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import F32, U32, Flag, In, InOut, Out, ReadOnly, by_subgroup, kernel, row_grid
from wgpu_lora.gpu.tensor import align
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.loss.loss import VocabularyLogprobs
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.objectives.objective import Group, Objective, Score, Scoring
from wgpu_lora.train.objectives.preference import one_loss, sigmoid, unused_by
from wgpu_lora.train.option_types import POSITIVE, own_option

LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo")
CLIPPED = LOSSES[:4]
UNCLIPPED = 3e38  # a delta that clips nothing
TINY = 1e-4  # that TRL adds to standard deviations
GAP = "sampling/sampling_logp_difference"
METRICS = (
    "tokens", "sequences", "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", f"{GAP}/mean", f"{GAP}/max",
)  # fmt: skip
OLD, REFERENCE, KEPT = range(3)  # columns of a token's inputs


def policy_losses(c: Any, a: float, logp: Any, kind: str, epsilons: tuple[float, float], delta: float,
                  temperatures: tuple[float, float]) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """(Loss of each token without the KL term, its derivative by log c, its derivative by the token's log p where c has
    no gradient, whether c is clipped from below, and from above), given ratios c and the completion's advantage a."""
    low, high = 1 - epsilons[0], 1 + epsilons[1]
    zeros = np.zeros_like(c)
    if kind == "cispo":
        k = np.minimum(c, epsilons[1]) * a
        return -k * logp, zeros, -k, zeros, (c > epsilons[1]) & (a > 0)
    if kind == "sapo":
        t = temperatures[0] if a > 0 else temperatures[1]
        s = sigmoid(t * (c - 1))
        return -s * 4 / t * a, -4 * s * (1 - s) * a * c, zeros, zeros, zeros
    outer, inner = np.minimum(c, delta), np.clip(c, low, high)
    is_outer = outer * a <= inner * a
    free = np.where(is_outer, c <= delta, c == inner)
    loss = -np.where(is_outer, outer, inner) * a
    return loss, np.where(free, -a * c, 0), zeros, (outer < low) & (a < 0), (outer > high) & (a > 0)


@kernel("objectives/grpo.wgsl.j2", grid=row_grid(lambda c: c.stride), lib=("logistic",), variants=by_subgroup)
def grpo_scores(
    state: In, inputs: ReadOnly, members: ReadOnly, group_weights: ReadOnly, advantages: ReadOnly, weights: InOut,
    values: Out, *,
    size: U32, stride: U32, rate: F32, sequence: Flag = False, summed: Flag = False, cispo: Flag = False,
    sapo: Flag = False, epsilon: F32 = 0.2, epsilon_high: F32 = 0.2, delta: F32 = UNCLIPPED, beta: F32 = 0.0,
    positive: F32 = 1.0, negative: F32 = 1.05,
) -> Any:  # fmt: skip
    """weights = derivatives of weight (policy_losses(c) + beta c k3) by -log p, with c = exp(log p - log p of sampling)
    of a token or, with `sequence`, of the completion, and k3 the KL estimate; values [9, g]: the loss and metrics."""
    top, total, target_logits, spread = state.reshape(-1, 4).T
    token_inputs, spans = inputs.reshape(-1, 3), members.reshape(size, 2).astype(int)
    weights, result = weights.copy(), np.zeros((9, stride))
    kind = "cispo" if cispo else "sapo" if sapo else "grpo"
    for g in np.flatnonzero(group_weights.reshape(-1)[:size]):
        w, a, rows = group_weights.reshape(-1)[g], advantages.reshape(-1)[g], slice(*spans[g])
        logp = rate * (target_logits[rows] - top[rows]) - np.log(total[rows])
        old, reference, mask = token_inputs[rows].T
        count = len(logp)
        drift, x = logp - old, reference - logp
        share = 1.0 if summed else 1 / max(1, count)
        ratio = np.full(count, share * drift.sum()) if sequence else drift
        c = np.exp(np.minimum(ratio, 80))
        loss, by_ratio, by_token, low, high = policy_losses(
            c, a, logp, kind, (epsilon, epsilon_high), delta, (positive, negative)
        )
        k3 = np.exp(x) - x - 1 if beta else np.zeros(count)
        slope = mask * (by_ratio + by_token) - (beta * c * x if beta else 0)
        if sequence:
            slope = mask * by_token + share * (mask.sum() * by_ratio + beta * c * k3.sum())
            slope += beta * c * (1 - np.exp(x)) if beta else 0
        weights[rows] = -w * slope
        once = 1 / max(1, count) if sequence else 1.0
        entropy = np.log(total[rows]) - spread[rows] / total[rows]
        result[:, g] = (
            w * (mask * loss + beta * c * k3).sum(), count, count > 0, entropy.sum(), (c * k3).sum(), once * low.sum(),
            once * high.sum(), np.abs(drift).sum(), np.abs(drift).max(initial=0),
        )  # fmt: skip
    return weights, result


@dataclass(frozen=True)
class GRPO(Objective):
    """Completions that the policy samples for each prompt, with rewards. Tokens of a completion become more likely if
    its reward is above the mean of its prompt's, as far as the ratio to the policy that sampled them is not clipped.

    The ratio is to the log-probability with which a token was sampled. The KL term (`beta`) is as in TRL, with the
    ratio as its factor (DeepSeek-V3.2). `top_entropy_quantile` is of the tokens of an optimizer step, by the entropies
    that they were sampled with.
    """

    formats: ClassVar = PROMPTS
    unit: ClassVar = "group"
    samples: ClassVar[bool] = True
    has_labels: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = True
    token_inputs: ClassVar[int] = 3
    metrics: ClassVar[tuple[str, ...]] = METRICS
    maxima: ClassVar[tuple[str, ...]] = (METRICS[-1],)
    progress_metrics: ClassVar[tuple[str, ...]] = ("reward", "reward_std", "completions/mean_length", "entropy", "kl")
    learning_rate: ClassVar[float] = 1e-5  # as for preferences; TRL has 1e-6, for all weights
    summed: ClassVar[bool] = False

    reward_funcs: str | None = None
    reward_weights: str | None = None
    reward_timeout: float = 60.0
    log_completions: int | None = None
    tools: str | None = None
    max_tool_calling_iterations: int | None = None
    num_generations: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    beta: float = 0.0
    num_iterations: int = 1
    steps_per_generation: int | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: str | None = None
    importance_sampling_level: str = "token"
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    sapo_temperature_pos: float = own_option(1.0, "Of sapo, for positive advantages.", within=POSITIVE)
    sapo_temperature_neg: float = own_option(1.05, "Of sapo, for other advantages.", within=POSITIVE)
    reference_adapter: str | None = None

    def __post_init__(self) -> None:
        _ = self.loss
        if self.reward_funcs is None:
            raise UserError(
                f"This objective learns from rewards, and {flag('reward_funcs')} is missing: give a function as "
                "FILE.py:NAME, or the name of a built-in one."
            )
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise UserError(
                f"{setting('delta', self.delta)} clips before {flag('epsilon_high')} does: give more than "
                f"{1 + self.upper:g}, or leave it out."
            )

    @classmethod
    def default_rate(cls, width: int) -> float:
        return cls.learning_rate

    @property
    def loss(self) -> str:
        return one_loss(self.loss_type, LOSSES, "grpo")

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def by_sequence(self) -> bool:
        """Whether a completion has one ratio."""
        return self.importance_sampling_level == "sequence"

    @property
    def reference(self) -> bool:  # type: ignore[override]
        return self.beta != 0

    @property
    def kl_coefficient(self) -> float:
        """Of the KL term of the loss."""
        return 0.0 if self.summed else self.beta

    @property
    def reference_path(self) -> str | None:
        return self.reference_adapter if self.reference else None

    @property
    def temperatures(self) -> tuple[float, ...]:
        return (self.temperature,)

    def cut(self) -> Cut:
        """A prompt that is too long keeps its end."""
        return Cut(mode=KEEP_END)

    def idle(self) -> dict[str, str]:
        result: dict[str, str] = {}
        if self.tools is None:
            result["max_tool_calling_iterations"] = "there are no tools"
        if self.loss not in CLIPPED:
            names = ["delta", "epsilon"] + (["epsilon_high"] if self.loss == "sapo" else [])
            result |= dict.fromkeys(names, unused_by(self.loss))
        if not self.reference:
            result["reference_adapter"] = f"{setting('beta', 0)} compares with no reference"
        return result

    # -- rewards ---------------------------------------------------------------------------------------------------

    def advantages(
        self, rewards: np.ndarray, weights: np.ndarray, penalties: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """(advantages [prompts, generations], 0 where nothing was rewarded; metrics).

        Args:
            rewards: [prompts, generations, functions], NaN where a function gave none. weights: [functions].
            penalties: [prompts, generations], subtracted from the rewards.
        """
        scored = ~np.isnan(rewards).all(-1)
        total = np.where(scored, np.nansum(rewards * weights, -1), np.nan)
        if self.multi_objective_aggregation == "normalize_then_sum":
            mean, deviation = nan_mean(rewards, 1), nan_std(rewards, 1)
            z_scores = (rewards - mean) / (deviation + TINY)
            summed = np.where(scored, np.nansum(z_scores * weights, -1), np.nan)
            spread = np.broadcast_to(nan_std(summed), summed.shape)
            result = (summed - nan_mean(summed)) / (spread + TINY)
        else:
            spread = np.broadcast_to(
                nan_std(total) if self.scale_rewards == "batch" else nan_std(total, 1), total.shape
            )
            result = total - nan_mean(total, 1)
            if self.scale_rewards != "none":
                result = result / (spread + TINY)
        return np.nan_to_num(result, nan=0.0), reward_metrics(total, spread)

    def completion_weights(self, lengths: Sequence[int], phase_tokens: int, parts: int) -> np.ndarray:
        """The weight of each token's loss, [completions of a step].

        Args:
            lengths: tokens of each that are trained on. phase_tokens: of the completions that were sampled together, of
                which a step trains one in `parts`.
        """
        sizes, count = np.array(lengths, float), len(lengths)
        if self.loss in ("grpo", "sapo"):
            return np.asarray(1 / (count * np.maximum(1, sizes)))
        if self.loss == "dr_grpo":
            return np.full(count, 1 / (count * self.max_completion_length))
        return np.full(count, 1 / max(1.0, sizes.sum() if self.loss == "bnpo" else phase_tokens / parts))

    def token_masks(self, entropies: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Which tokens of a step's completions the policy's loss counts, given the entropies that they were sampled
        with (Wang et al. 2025)."""
        if self.top_entropy_quantile >= 1 or not sum(map(len, entropies)):
            return [np.ones(len(values)) for values in entropies]
        threshold = np.quantile(np.concatenate(entropies).astype(np.float32), 1 - self.top_entropy_quantile)
        return [(values >= threshold).astype(float) for values in entropies]

    # -- the loss --------------------------------------------------------------------------------------------------

    def has_reference(self, group: Group) -> bool:
        return not self.reference or group.reference is not None

    def referenced(self, group: Group, logprobs: Sequence[np.ndarray]) -> Group:
        assert group.inputs is not None
        inputs = group.inputs.copy()
        inputs[:, REFERENCE] = logprobs[0]
        return replace(group, inputs=inputs, reference=())

    def logged(self, totals: Mapping[str, float], units: int) -> dict[str, float]:
        """Means over tokens; clipping by sequences if they have one ratio. The difference between log-probabilities is
        not known of skipped tokens."""
        tokens = max(1.0, totals["tokens"])
        result = {"entropy": totals["entropy"] / tokens}
        if self.kl_coefficient:
            result["kl"] = totals["kl"] / tokens
        low, high = (totals[name] / (max(1.0, totals["sequences"]) if self.by_sequence else tokens)
                     for name in METRICS[4:6])  # fmt: skip
        if self.loss == "cispo":
            result["cispo_clip_ratio"] = high
        elif self.loss in CLIPPED:
            result |= {METRICS[4]: low, METRICS[5]: high, "clip_ratio/region_mean": low + high}
        mean = totals[f"{GAP}/mean"] / max(1.0, tokens - totals.get("skipped_tokens", 0))
        return result | {f"{GAP}/mean": mean, f"{GAP}/max": totals[f"{GAP}/max"]}

    def score_vocabulary(self, rec: Recorder, vocabulary: VocabularyLogprobs, scoring: Scoring) -> Score:
        groups = scoring.groups
        assert groups is not None
        assert scoring.inputs is not None
        size = groups.weights.size
        stride = align(4 * size) // 4
        weights, values = rec.temp(scoring.weights.shape, name="weights"), rec.temp((9, stride), name="grpo")
        rec.dispatch(fill, weights, size=weights.size)
        rec.dispatch(
            grpo_scores, vocabulary.states[self.temperature], scoring.inputs, groups.members, groups.weights,
            groups.values, weights, values, size=size, stride=stride, rate=1 / self.temperature, **self.constants(),
        )  # fmt: skip
        losses, *metrics = (values.rows(i, i + 1).reshape(stride) for i in range(9))
        return Score(weights, losses, dict(zip(METRICS, metrics, strict=True)))

    def constants(self) -> dict[str, Any]:
        return {
            "sequence": self.by_sequence,
            "summed": self.summed,
            "cispo": self.loss == "cispo",
            "sapo": self.loss == "sapo",
            "epsilon": self.epsilon,
            "epsilon_high": self.upper,
            "delta": UNCLIPPED if self.delta is None else self.delta,
            "beta": self.kl_coefficient,
            "positive": self.sapo_temperature_pos,
            "negative": self.sapo_temperature_neg,
        }


def nan_mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of what is not NaN, with the axis kept; NaN of nothing."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(values, axis, keepdims=True) / count)


def nan_std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The standard deviation of a sample of what is not NaN, with the axis kept; NaN of fewer than two."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        squares = np.nansum((values - nan_mean(values, axis)) ** 2, axis, keepdims=True)
        return np.asarray(np.where(count > 1, np.sqrt(squares / (count - 1)), np.nan))


def reward_metrics(total: np.ndarray, spread: np.ndarray) -> dict[str, float]:
    """Of rewards [prompts, generations], and the standard deviation that each is compared with."""
    result = {"reward": float(nan_mean(total).item()), "reward_std": float(nan_std(total).item())}
    return result | {"frac_reward_zero_std": float(np.isclose(spread, 0).mean())}
