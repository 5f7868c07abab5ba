"""A loss curve as numbers that an SVG needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 12.0, 34.0
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """points: of the training loss, as a polyline has them; heldout: (x, y, step, loss) of each.

    x_ticks, y_ticks: (place, text).
    """

    points: str
    heldout: list[tuple[float, float, int, float]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def draw_curve(losses: Sequence[float | str], heldout: Sequence[tuple[int, float | str]]) -> Curve:
    """The loss of each step, from 1, and the held-out losses; what is not a finite number is left out."""
    train = [(step, float(v)) for step, v in enumerate(losses, 1) if math.isfinite(float(v))]
    held = [(int(step), float(v)) for step, v in heldout if math.isfinite(float(v))]
    highest = max([v for _, v in (*train, *held)], default=1.0) or 1.0
    unit = _round_up(highest / TICKS)
    ceiling = unit * math.ceil(highest / unit)
    last = max([step for step, _ in (*train, *held)], default=1)

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(loss: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / ceiling, 1)

    every = max(1, round(_round_up(last / TICKS)))
    return Curve(
        " ".join(f"{x(step)},{y(loss)}" for step, loss in train),
        [(x(step), y(loss), step, loss) for step, loss in held],
        [(x(step), str(step)) for step in range(0, last + 1, every)],
        [(y(unit * i), f"{unit * i:g}") for i in range(round(ceiling / unit) + 1)],
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ... at its scale."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(scale * factor for factor in (1, 2, 5, 10) if value <= scale * factor * (1 + 1e-9))
