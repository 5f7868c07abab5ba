"""Results as a person reads them."""

from __future__ import annotations

from typing import Any

from wgpu_lora.bench.ceiling import Ceilings
from wgpu_lora.bench.compare import Comparison
from wgpu_lora.bench.results import BROKEN, HOLDS, NOISY, Result

COLUMNS = ("brick", "median", "p20 to p80", "CV", "runs", "GFLOP/s", "GB/s", "of floor", "budget", "NMSE", "contract")
STYLES = {HOLDS: None, NOISY: "yellow", BROKEN: "red"}


def duration(seconds: float) -> str:
    """Three digits and a unit: 1.23 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.3g} us"


def cells(result: Result) -> tuple[str, ...]:
    """One for each of COLUMNS."""
    budget, reference = result.budget, result.reference
    asked = "" if budget["asked"] is None else f" (>= {budget['asked']:g})"
    of = "" if budget["of"] == "floor" else f" {budget['of']}"
    note = "*" if reference and reference["in_part"] else ""
    return (
        result.label,
        duration(result.seconds) + ("" if result.clock == "timestamps" else " host"),
        f"{duration(result.p20)} to {duration(result.p80)}",
        f"{result.cv:.1%}",
        str(result.iterations),
        f"{result.gflops:.3g}",
        f"{result.gbs:.3g}",
        f"{result.share_of_floor:.2f}",
        f"{budget['reached']:.2f}{of}{asked}",
        f"{reference['nmse']:.1e}{note}" if reference else "none",
        f"{BROKEN}, {NOISY}" if result.broken and result.noisy else result.verdict,
    )


def noise_text(result: Result) -> str:
    """Why it is noisy."""
    asked = f"its contract asks for less than {result.cv_asked:.0%}"
    return f"its {result.iterations} timings vary by {result.cv:.1%}, {asked}"


def table(results: list[Result]) -> Any:
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in ("brick", "contract", "budget") else "right")
    for result in results:
        made.add_row(*cells(result), style=STYLES[result.verdict])
    return made


def plain(result: Result) -> str:
    """One line."""
    named = zip(COLUMNS[1:], cells(result)[1:], strict=True)
    extra = (f"{name} {value:.4g}" for name, value in result.extra.items())
    return ", ".join([result.label, *(f"{name} {value}" for name, value in named), *extra])


def ceiling_text(ceilings: Ceilings) -> str:
    """One line."""
    beside = f" (NumPy's matmul {ceilings.numpy_gflops:.4g})" if ceilings.numpy_gflops else ""
    return (
        f"FMA {ceilings.fma_gflops:.4g} GFLOP/s{beside}, streaming {ceilings.bandwidth_gbs:.3g} GB/s, "
        f"NF4 decoding and FMA {ceilings.decode_fma_gflops:.4g} GFLOP/s, dispatch {duration(ceilings.dispatch_seconds)}"
    )


def comparison_cells(c: Comparison) -> tuple[str, ...]:
    return c.label, duration(c.old), duration(c.new), f"{c.ratio:.3f}", c.verdict


def comparison_table(comparisons: list[Comparison]) -> Any:
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for column in ("brick", "old", "new", "new / old", "verdict"):
        made.add_column(column, justify="left" if column in ("brick", "verdict") else "right")
    for c in comparisons:
        made.add_row(*comparison_cells(c))
    return made
