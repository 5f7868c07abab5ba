"""Learning rates, step by step, as transformers has them."""

from __future__ import annotations

import math


def learning_rate(kind: str, peak: float, step: int, total: int, warmup: int) -> float:
    """The rate of the 0-based `step` of `total`, rising linearly over the first `warmup`.

    cosine falls to 0 along half a cosine, linear along a line; `constant` does not even rise.
    """
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * step / max(1, warmup)
    if kind == "constant_with_warmup":
        return peak
    progress = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return peak * max(0.0, 1 - progress)
    return peak * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def warmup_steps(total: int, ratio: float) -> int:
    return math.ceil(total * ratio)
