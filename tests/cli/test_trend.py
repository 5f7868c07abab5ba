"""The line of bars that shows how a loss develops."""

from __future__ import annotations

import io
import math

from wgpu_lora.cli.training_progress import BARS, MOST, PLAIN, Trend, hardware

UTF8, ASCII = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("utf-8", "ascii"))


def trend(*values: float, stream: io.TextIOWrapper = UTF8) -> Trend:
    found = Trend(stream)
    for value in values:
        found.add(value)
    return found


def test_bars() -> None:
    assert trend(*range(8, 0, -1)).bars() == BARS[::-1]
    assert trend(*range(8), stream=ASCII).bars() == PLAIN
    assert trend(*range(8)).bars(3) == BARS[0] + BARS[4] + BARS[7]
    assert trend(1.0).bars() == trend().bars() == ""
    assert trend(2.0, 2.0).bars() == BARS[0] * 2
    assert trend(1.0, math.nan, math.inf, 2.0).bars() == BARS[0] + BARS[-1]


def test_a_long_run_stays_a_line() -> None:
    found = trend(*(1 / (step + 1) for step in range(10_000)))
    bars = found.bars()
    assert MOST / 2 <= len(bars) <= MOST
    assert bars[0] == BARS[-1]
    assert bars[-1] == BARS[0]
    assert len(found._means) + len(found._left) < 10 * MOST


def test_hardware() -> None:
    assert hardware({"loss": 1.0}) == ""
    assert hardware({"gpu_busy": 97.4, "gpu_temperature": 61.0}) == "97% busy, 61 °C"
