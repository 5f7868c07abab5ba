"""Learning rates, step by step: transformers' schedules, but for a first step that is never at rate 0."""

from __future__ import annotations

import math


def learning_rate(kind: str, peak: float, step: int, total: int, warmup: int) -> float:
    """The rate of the 0-based `step` of `total`, rising linearly over the first `warmup` to reach its peak after them.

    cosine falls to 0 along half a cosine, linear along a line; `constant` does not even rise. transformers' first step
    has the rate 0 and trains nothing: these are its schedules of `warmup` + 1 and `total` + 1 steps without that one.
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
    """Steps of warm-up: `steps`, or else `ratio` of all, but never all of them."""
    return min(steps or math.ceil(total * ratio), max(0, total - 1))
