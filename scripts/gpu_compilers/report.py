"""What the compilers said: tables for a terminal, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from scripts.gpu_compilers.run import Answers, Row

SCHEMA = "wgpu-lora-gpu-compilers/1"
WORST = 3  # kernels named in the summary


def to_json(answers: Sequence[Answers], wanted: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "wanted": wanted, "devices": [one.to_json() for one in answers]}


def label(row: Row) -> str:
    """A pipeline in words: the kernel, what it is compiled for, and the tiling."""
    words = [str(v) for n, v in row.call["constants"].items() if n in ("a_type", "b_type", "form", "dim")]
    return " ".join([row.call["kernel"], *words])


def tiling(row: Row) -> str:
    t = row.tiling
    return f"{t.family} {t.rows}x{t.cols}, span {t.span}" + (", 64-bit loads" if t.wide else "")


def weight(row: Row) -> tuple[int, int, int]:
    """What the worst have most of."""
    c = row.compiled
    return (1 << 30, 0, 0) if c is None else (c.spilled, c.scratch, c.registers)


def summary(answers: Sequence[Answers]) -> Table:
    """A line for each GPU and subgroup size."""
    table = Table(title="Compiled, not run", title_justify="left", box=None, pad_edge=False)
    table.add_column("GPU", overflow="fold")
    for name in ("subgroup", "pipelines", "default spills", "offered spills"):
        table.add_column(name, justify="right")
    table.add_column("worst (values spilled)", overflow="fold")
    for one in answers:
        bad = [row for row in one.rows if row.spills]
        worst = sorted(bad, key=weight, reverse=True)[:WORST]
        table.add_row(
            one.gpu.title,
            str(one.subgroup_size),
            str(len(one.rows)),
            str(sum(row.call["default"] for row in bad)),
            str(len(bad)),
            Text("\n".join(f"{label(row)}, {tiling(row)}: {amount(row)}" for row in worst) or "none"),
        )
    return table


def amount(row: Row) -> str:
    c = row.compiled
    return row.error if c is None else f"{c.scratch} bytes of arrays" if c.scratch and not c.spilled else str(c.spilled)


def details(one: Answers) -> Table:
    """A line for each compute pipeline, the worst first."""
    title = f"{one.gpu.title}, subgroups of {one.subgroup_size}: {one.device}, {one.driver}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("kernel", "tiling"):
        table.add_column(name, overflow="fold")
    columns = (
        "registers",
        "spilled",
        f"{one.gpu.occupancy[0]}, of {one.most}",
        "shared bytes",
        "instructions",
        "inner loop",
        "multiply-adds",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in sorted(one.rows, key=weight, reverse=True):
        c = row.compiled
        kernel = Text(label(row), style="red" if row.spills else "")
        where = tiling(row) + (" (default)" if row.call["default"] else "")
        if c is None:
            table.add_row(kernel, where, "-", row.error)
            continue
        loop = (
            ("", "") if c.loop is None else (str(c.loop.instructions), f"{c.loop.share:.0%} ({c.loop.multiply_adds})")
        )
        figures = (c.registers, amount(row), c.occupancy, c.shared, c.instructions)
        table.add_row(kernel, where, *map(str, figures), *loop)
    return table


def show(answers: Sequence[Answers], every: bool) -> None:
    parts: list[Any] = [details(one) for one in answers] if every else []
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    console.print(Group(*parts, summary(answers)))
