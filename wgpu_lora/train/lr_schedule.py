"""Learning-rate schedules, as in transformers, except that the first step never has a rate of 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LRSchedule:
    """A learning-rate schedule.

    decay: progress after the warm-up, from 0 to 1 -> share of the peak; None if the rate stays at the peak.
    warms_up: whether the rate first rises linearly to the peak.
    """

    decay: Callable[[float], float] | None = None
    warms_up: bool = True


LR_SCHEDULES = {
    "cosine": LRSchedule(lambda progress: max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))),
    "linear": LRSchedule(lambda progress: max(0.0, 1 - progress)),
    "constant": LRSchedule(warms_up=False),
    "constant_with_warmup": LRSchedule(),
}


def learning_rate(kind: str, peak: float, step: int, total: int, warmup: int, minimum: float = 0.0) -> float:
    """The rate of the 0-based `step` of `total`, with a linear warm-up to the peak over the first `warmup` steps.

    It then decays to `minimum`, as transformers' cosine_with_min_lr does to its min_lr: minimum + (peak - minimum) *
    decay.

    In transformers, the first step has a rate of 0 and trains nothing: these are its schedules of `warmup` + 1 and
    `total` + 1 steps without it.
    """
    schedule = LR_SCHEDULES[kind]
    if schedule.warms_up and step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return decayed(kind, peak, (step - warmup) / max(1, total - warmup), minimum)


def decayed(kind: str, peak: float, progress: float, minimum: float = 0.0) -> float:
    """The rate at `progress` after the warm-up, from 0 to 1."""
    decay = LR_SCHEDULES[kind].decay
    return peak if decay is None else minimum + (peak - minimum) * decay(progress)


def warmup_steps(total: int, ratio: float, steps: int = 0) -> int:
    """Warm-up steps: `steps`, or else `ratio` of all, but never all of them."""
    return min(steps or math.ceil(total * ratio), max(0, total - 1))
