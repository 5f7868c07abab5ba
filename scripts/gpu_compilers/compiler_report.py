"""What the compilers made of the kernels: tables, JSON, and predictions for `make bench-gpu`.

`make gpu-compilers GPUS='--default-only --predictions scripts/gpu_compilers/predictions.json'` writes those of the
default tilings to a small file, to be put beside measurements of a GPU of the same kind.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from scripts.gpu_compilers.compiler_run import Answers, Row
from wgpu_lora.bench.brick_results import commit
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.gpu.device import Device

PREDICTIONS = "wgpu-lora-predictions/2"
FILE = Path(__file__).with_name("predictions.json")
FIGURES = ("registers", "spilled", "occupancy", "instructions", "bound")
LOSS = 0.05  # of a bound, beyond which it has fallen, or is worse than another
AMD, NVIDIA = 0x1002, 0x10DE
GENERATIONS = {  # parts of the names that drivers give AMD's GPUs; RDNA2's units are those of RDNA1
    "rdna4": ("RX 9", "AI PRO R9", "GFX12", "NAVI4"),
    "rdna3": ("RX 7", "PRO W7", "GFX11", "NAVI3", "780M", "760M", "890M", "880M", "8060S", "8050S"),
    "rdna1": ("RX 5", "RX 6", "PRO W5", "PRO W6", "GFX10", "NAVI1", "NAVI2", "680M", "660M"),
}
Predicted = dict[str, Any]
SCHEMA = "wgpu-lora-gpu-compilers/2"
WORST = 3  # kernels named in the summary


def to_json(answers: Sequence[Answers], selection: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "wanted": selection, "devices": [answer.to_json() for answer in answers]}


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
    for answer in answers:
        rows = [row for row in answer.rows if not row.repeated]
        bad = [row for row in rows if row.spills]
        worst = sorted(bad, key=weight, reverse=True)[:WORST]
        table.add_row(
            answer.gpu.title,
            str(answer.subgroup_size),
            str(len(rows)),
            str(sum(row.call["default"] for row in bad)),
            str(len(bad)),
            Text("\n".join(f"{label(row)}, {tiling(row)}: {amount(row)}" for row in worst) or "none"),
        )
    return table


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Tilings of a call, the fastest by their bound first; those that spill, or have no bound, last."""
    return sorted(rows, key=lambda row: (row.spills, -row.bound.speed if row.bound else 0))


def bounds(answers: Sequence[Answers]) -> Table:
    """A line for each kernel of products: the lowest bound of its default tilings, and the best tiling of that call if
    its bound is higher by LOSS: the tuner should be offered it first."""
    title = (
        f"Share of the peak that the busiest port allows; the best tiling, if that is {LOSS:.0%} above the default's"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    lines: dict[str, list[str]] = defaultdict(lambda: [""] * len(answers))
    for column, answer in enumerate(answers):
        table.add_column(f"{answer.gpu.name}, {answer.subgroup_size}", overflow="fold")
        calls, lowest = defaultdict[str, list[Row]](list), dict[str, Row]()
        for row in answer.rows:
            calls[key(row.call, tiled=False)].append(row)
            if row.bound and row.call["default"] and row.tiling.family != "few":  # memory decides there
                name = f"{label(row)}, {row.tiling.family}"
                lowest[name] = min(row, lowest.get(name, row), key=share)
        for name, row in lowest.items():
            best = best_first(calls[key(row.call, tiled=False)])[0]
            above = best.bound and row.bound and best.bound.speed > (1 + LOSS) * row.bound.speed
            better = f"; {share(best):.2f} in {tiling(best)}" if above else ""
            lines[name][column] = f"{share(row):.2f} {row.bound.port if row.bound else ''}{better}"
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def share(row: Row) -> float:
    return round(row.bound.share, 3) if row.bound else 0.0


def amount(row: Row) -> str:
    c = row.compiled
    return row.error if c is None else f"{c.scratch} bytes of arrays" if c.scratch and not c.spilled else str(c.spilled)


def details(answer: Answers) -> Table:
    """A line for each compute pipeline, the worst first."""
    title = f"{answer.gpu.title}, subgroups of {answer.subgroup_size}: {answer.device}, {answer.driver}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("kernel", "tiling"):
        table.add_column(name, overflow="fold")
    columns = (
        "registers",
        "spilled",
        f"{answer.gpu.occupancy[0]}, of {answer.max_occupancy}",
        "shared bytes",
        "instructions",
        "inner loop",
        "multiply-adds",
        "bound",
    )
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("counts", overflow="fold")
    for row in sorted((row for row in answer.rows if not row.repeated), key=weight, reverse=True):
        c = row.compiled
        kernel = Text(label(row), style="red" if row.spills else "")
        where = tiling(row) + (" (default)" if row.call["default"] else "")
        if c is None:
            table.add_row(kernel, where, "-", row.error)
            continue
        loop = ["", "", "", ""]
        if c.loop:
            counts = ", ".join(
                f"{count} {kind}" for kind, count in sorted(c.loop.counts.items(), key=lambda of: -of[1])
            )
            busiest = f"{row.bound.share:.2f} {row.bound.port}" if row.bound else ""
            loop = [str(c.loop.instructions), f"{c.loop.share:.0%} ({c.loop.multiply_adds})", busiest, counts]
        figures = (c.registers, amount(row), c.occupancy, c.shared, c.instructions)
        table.add_row(kernel, where, *map(str, figures), *loop)
    return table


def show(answers: Sequence[Answers], with_details: bool) -> None:
    parts: list[Any] = [details(answer) for answer in answers] if with_details else []
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    console.print(Group(*parts, bounds(answers), summary(answers)))


# -- predictions -------------------------------------------------------------------------------------------------------


def key(call: Mapping[str, Any], tiled: bool = True) -> str:
    """A compute pipeline (`Call.to_json`), as its kernel and a digest of all that is compiled into it.

    tiled: whether the tiling is part of it.
    """
    compiled = [call[name] for name in ("constants", "bindings", *(["tiling"] if tiled else []))]
    digest = hashlib.sha256(json.dumps(compiled, sort_keys=True).encode()).hexdigest()
    return f"{call['kernel']} {digest[:12]}"


def predictions_json(answers: Sequence[Answers]) -> Predicted:
    """The figures of every default tiling, by pipeline; FIGURES, or null where the compiler gave up."""
    devices = []
    for answer in answers:
        rows = {
            key(row.call): row.compiled
            and [*(getattr(row.compiled, name) for name in FIGURES[:-1]), share(row) if row.bound else None]
            for row in answer.rows
            if row.call["default"]
        }
        devices.append({**answer.to_json(), "title": answer.gpu.title, "kernels": rows})
    return {"schema": PREDICTIONS, "commit": commit(), "figures": FIGURES, "devices": devices}


def nearest(device: Device, predicted: Predicted) -> Predicted | None:
    """The predictions for the GPU and subgroup size most like a device; None for a device of another vendor."""
    gpu = kind_of(device.info.vendor_id, device.info.name)
    candidates = [entry for entry in predicted["devices"] if entry["gpu"] == gpu]
    size = device.capabilities.subgroup_size
    return min(candidates, key=lambda entry: abs(entry["subgroup_size"] - size), default=None)


def kind_of(vendor: int, name: str) -> str | None:
    """The GPU of `GPUS` that a device is most like: of AMD's RDNA3, unless its name tells the generation."""
    if vendor == AMD:
        parts = ((gpu, part) for gpu, parts in GENERATIONS.items() for part in parts)
        return next((gpu for gpu, part in parts if part in name.upper()), "rdna3")
    return "ada" if vendor == NVIDIA else "m1" if "Apple" in name else None


def figures(prediction: Predicted | None, calls: Iterable[Mapping[str, Any]]) -> list[Predicted | None]:
    """The prediction for each pipeline by name; None if it was not compiled."""
    kernels = prediction["kernels"] if prediction else {}
    values = (kernels.get(key(call)) for call in calls)
    return [value and dict(zip(FIGURES, value, strict=True)) for value in values]


def losses(answer: Answers, predicted: Predicted) -> list[str]:
    """A sentence for each default tiling whose bound has fallen. Other drivers' predictions are not compared."""
    of = {"gpu": answer.gpu.name, "subgroup_size": answer.subgroup_size}
    baseline = next((device for device in predicted["devices"] if of.items() <= device.items()), None)
    if baseline and baseline["driver"] != answer.driver:
        message = f"bounds are not compared, since predictions.json is of {baseline['driver']}, not of {answer.driver}"
        print(f"{answer.gpu.title}, subgroups of {answer.subgroup_size}: {message}", file=sys.stderr)
        baseline = None
    rows = [row for row in answer.rows if row.call["default"] and row.compiled and not row.repeated]
    sentences = []
    for row, before in zip(rows, figures(baseline, (row.call for row in rows)), strict=True):
        if before and before["bound"] and share(row) < (1 - LOSS) * before["bound"]:
            where = f"{answer.gpu.title}, subgroups of {answer.subgroup_size}: {label(row)}, {tiling(row)}"
            port = f"; the busiest port is {row.bound.port}" if row.bound else ""
            sentences.append(
                f"{where}: its bound fell from {before['bound']:.3f} of the peak to {share(row):.3f}{port}"
            )
    return list(dict.fromkeys(sentences))


def read_predictions() -> Predicted:
    """The file's content, or no devices if it is missing."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {"devices": []}


def write_predictions(file: Path, predicted: Predicted) -> None:
    """A line for each device, so that changes can be read."""
    header = {name: value for name, value in predicted.items() if name != "devices"}
    devices = ",\n".join(json.dumps(device) for device in predicted["devices"])
    write_bytes_atomic(file, f'{json.dumps(header)[:-1]}, "devices": [\n{devices}\n]}}\n'.encode())
