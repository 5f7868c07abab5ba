"""Speeds of devices, from result files of `wgpu-lora bench --json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.bench.brick_results import Result, read_results
from wgpu_lora.errors import UserError

# The bricks that measure what placement needs: tokens/s of one adapter, and its gain in pipelines.
BRICKS = {
    "device_speed": ("tokens_per_second", "joined_speedup"),
    "multi_adapter_step": ("short_alone_tokens_per_second", "short_speedup"),
}
OURS = Path(__file__).with_name("measured") / "lavapipe.jsonl"
# Only lavapipe has been measured, on a machine with other work. Four speeds are made of it: placement depends on
# how much speeds differ, not on how high they are.
FACTORS = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Measured:
    """A kind of device.

    Attributes:
        speed: tokens/s of one adapter. joined_speedup: of three together over one after another.
        slowest, fastest: the middle 60% of the timings, relative to their median.
    """

    name: str
    speed: float
    joined_speedup: float
    slowest: float
    fastest: float


def read_measured(files: Sequence[Path]) -> list[Measured]:
    """One kind of device per file, the slowest first. Without files, four kinds: lavapipe as it was measured, and
    devices that are 2, 4 and 8 times as fast.

    Raises:
        UserError: a file cannot be read, or has no result of one of BRICKS.
    """
    if not files:
        ours = _read(OURS)
        return [replace(ours, name=f"{factor:g} x {ours.name}", speed=factor * ours.speed) for factor in FACTORS]
    return sorted((_read(path) for path in files), key=lambda one: (one.speed, one.name))


def _read(path: Path) -> Measured:
    header, results = read_results(path)
    result = next((one for one in results if one.brick in BRICKS and _figures(one)), None)
    if result is None:
        raise UserError(
            f"{path} does not say how fast a device trains: give a file that 'wgpu-lora bench --brick device_speed "
            "--json' wrote."
        )
    speed, joined = _figures(result)
    slowest, fastest = result.seconds / result.p80, result.seconds / result.p20
    return Measured(str(header["device"].get("name")), speed, joined, slowest, fastest)


def _figures(result: Result) -> list[float]:
    found = [result.extra.get(name) for name in BRICKS[result.brick]]
    good = [float(one) for one in found if isinstance(one, float | int) and one > 0]
    return good if len(good) == len(found) else []
