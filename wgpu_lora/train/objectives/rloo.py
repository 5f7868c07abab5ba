"""REINFORCE leave-one-out (Ahmadian et al. 2024), as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.names.spelling import setting
from wgpu_lora.train.objectives.grpo import GRPO, TINY, UNCLIPPED, nan_mean, nan_std, reward_metrics
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.option_types import own_option


@dataclass(frozen=True)
class RLOO(GRPO):
    """The reward of a completion, less `beta` times its log-ratio to the reference, is compared with the mean of the
    prompt's others, and the clipped ratio is that of whole completions. With `normalize_advantages`, advantages are
    then normalised over all that were sampled together, as in REINFORCE++ (Hu 2025)."""

    summed: ClassVar[bool] = True

    num_generations: int = 2
    beta: float = 0.05
    normalize_advantages: bool = own_option(False, "Normalise advantages over all that were sampled together.")

    @property
    def loss(self) -> str:
        return "grpo"

    @property
    def by_sequence(self) -> bool:
        return True

    def idle(self) -> dict[str, str]:
        names = ("loss_type", "delta", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation",
                  "top_entropy_quantile")  # fmt: skip
        return super().idle() | dict.fromkeys(names, f"{setting('objective', 'rloo')} does not use it")

    def has_reference(self, group: Group) -> bool:
        return True  # rewards have the KL term, and not the loss

    def token_masks(self, entropies: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.ones(len(values)) for values in entropies]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"delta": UNCLIPPED}

    def advantages(
        self, rewards: np.ndarray, weights: np.ndarray, penalties: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        scored = ~np.isnan(rewards).all(-1)
        plain = np.where(scored, np.nansum(rewards * weights, -1), np.nan)
        total = plain if penalties is None else plain - penalties
        other_count = scored.sum(1, keepdims=True) - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            result = total - (np.nansum(total, 1, keepdims=True) - total) / other_count
        if self.normalize_advantages:
            result = (result - nan_mean(result)) / (nan_std(result) + TINY)
        spread = np.broadcast_to(nan_std(total, 1), total.shape)
        return np.nan_to_num(result, nan=0.0, posinf=0.0, neginf=0.0), reward_metrics(plain, spread)
