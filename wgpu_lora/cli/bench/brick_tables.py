"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wgpu_lora.bench.brick_results import BROKEN, HOLDS, NOISY, Comparison, Result
from wgpu_lora.bench.device_ceilings import Ceilings
from wgpu_lora.names.text import count_noun, percent

if TYPE_CHECKING:
    from wgpu_lora.bench.result_comparison import Figure

COLUMNS = ("brick", "time", "spread", "rate", "of ceiling", "limit", "verdict")
LEFT = ("brick", "verdict")
KEY = """\
time: the median of the runs. spread: their standard deviation over the mean.
of ceiling: the share that is reached of the device's maximum, measured above.
limit: the smallest share that passes, if there is one.
noisy: the times vary too much to tell."""
UNTUNED = "the defaults on both sides, since there was no time to measure all: --retune takes up to 5 minutes"
VERDICTS = {HOLDS: "passed", NOISY: "noisy", BROKEN: "failed"}  # verdict of a result -> its text
STYLES = {HOLDS: None, NOISY: "yellow", BROKEN: "red"}


def duration(seconds: float) -> str:
    """Three digits and a unit: 1.23 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.3g} us"


def cells(result: Result) -> tuple[str, ...]:
    """One for each of COLUMNS."""
    share = result.budget["asked"]
    of_memory = result.budget["of"] == "bandwidth"
    return (
        result.label,
        duration(result.seconds),
        f"{result.cv:.0%}",
        rate(result.gbs, "B/s") if of_memory else rate(result.gflops, "FLOP/s"),
        percent(result.budget["reached"]),
        "none" if share is None else percent(share),
        VERDICTS[result.verdict],
    )


def rate(billions: float, unit: str) -> str:
    """Three digits and a unit: 12.3 GB/s."""
    for prefix, factor in (("T", 1e3), ("G", 1.0)):
        if billions >= factor:
            return f"{billions / factor:.3g} {prefix}{unit}"
    return f"{billions * 1e3:.3g} M{unit}"


def noise_text(result: Result) -> str:
    """The reason why a result is noisy."""
    if result.impossible:
        return f"{result.impossible[0]} is negative, which only noise explains: measure again"
    return f"{count_noun(result.iterations, 'timing')} vary by {result.cv:.1%}, the limit is {result.cv_asked:.0%}"


def details(result: Result) -> str:
    """Facts that are not in the table: the clock, the error, and the brick's own figures."""
    clock = "the device's clock" if result.clock == "timestamps" else "the host's clock"
    text = [f"{count_noun(result.iterations, 'run')} by {clock}"]
    text.append(f"the middle 60% from {duration(result.p20)} to {duration(result.p80)}")
    if result.reference:
        part = " (the largest kernels in part)" if result.reference["in_part"] else ""
        text.append(f"relative squared error {result.reference['nmse']:.1e} against float64{part}")
    text += [_figure(name, value) for name, value in result.extra.items()]
    return f"{result.label}: {', '.join(text)}"


def _figure(name: str, value: float) -> str:
    """A brick's own figure."""
    if name == "frozen_seconds":
        return f"the frozen matmuls take {duration(value)}"
    if name == "added_share":
        return f"the adapters add {percent(value)} to that" if value >= 0 else "what the adapters add is lost in noise"
    return f"{name.replace('_', ' ')} {value:,.4g}"


def ceiling_lines(ceilings: Ceilings) -> list[str]:
    comparison = f" (NumPy's matmul: {ceilings.numpy_gflops:.4g})" if ceilings.numpy_gflops else ""
    return [
        f"compute {ceilings.fma_gflops:.4g} GFLOP/s{comparison}, decoding NF4 {ceilings.decode_fma_gflops:.4g} GFLOP/s",
        f"memory {ceilings.bandwidth_gbs:.3g} GB/s, starting a kernel {duration(ceilings.dispatch_seconds)}",
    ]


def comparison_cells(c: Comparison) -> tuple[str, ...]:
    return c.new.label, duration(c.old.seconds), duration(c.new.seconds), f"{c.ratio:.3f}", c.verdict


def comparing_cells(label: str, figures: Sequence[Figure | None], ratio: bool) -> tuple[str, ...]:
    """A row of figures of the same name, one per file; with the ratio of the second to the first if there are two."""
    cells = [label, *("" if item is None else figure(item) for item in figures)]
    if ratio:
        old, new = figures
        cells.append(f"{new.value / old.value:.3f}" if old and new and old.value else "")
    return tuple(cells)


def figure(measurement: Figure) -> str:
    """A figure with its unit."""
    from wgpu_lora.train.memory import format_bytes

    if measurement.unit == "s":
        return duration(measurement.value)
    if measurement.unit == "bytes":
        return format_bytes(int(measurement.value))
    return f"{measurement.value:,.4g}{measurement.unit}" if measurement.unit == "/s" else f"{measurement.value:,.6g}"
