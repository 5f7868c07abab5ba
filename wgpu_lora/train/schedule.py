"""Learning-rate schedules, as in transformers, except that the first step never has a rate of 0."""

from __future__ import annotations

import math


def learning_rate(kind: str, peak: float, step: int, total: int, warmup: int) -> float:
    """The rate of the 0-based `step` of `total`, with a linear warm-up to the peak over the first `warmup` steps.

    cosine falls to 0 along half a cosine, linear along a line; `constant` has no warm-up. In transformers, the first
    step has a rate of 0 and trains nothing: these are its schedules of `warmup` + 1 and `total` + 1 steps without it.
    """
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if kind == "constant_with_warmup":
        return peak
    progress = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return peak * max(0.0, 1 - progress)
    return peak * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def warmup_steps(total: int, ratio: float, steps: int = 0) -> int:
    """Warm-up steps: `steps`, or else `ratio` of all, but never all of them."""
    return min(steps or math.ceil(total * ratio), max(0, total - 1))
