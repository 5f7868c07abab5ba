"""wgpu-lora bench --training and --find-max-batch: what a whole run takes, and how large a batch can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import console, line
from wgpu_lora.cli.finetune import speed
from wgpu_lora.events import Events
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.bench.max_batch import Batches
    from wgpu_lora.bench.training import Work

FINISHED = ("epochs", "max steps", "target seconds")
# What others count as tokens per second differs, so it is said which.
SPREAD_NAMES = {"tokens_per_second": "processed tokens/s", "trained_tokens_per_second": "trained tokens/s"}
Record = dict[str, Any]


def training(work: Work, repeat: int, json_file: str | None, projecting: bool = False) -> int:
    """Runs the whole loop `repeat` times; 1 where a run did not come to its end."""
    from wgpu_lora.bench.training import run_training, trained_config

    write = _lines_to(json_file)
    found = run_training(work, repeat, _Lines(write, _show_training))
    if projecting:
        from wgpu_lora.bench.projection import project
        from wgpu_lora.gpu.device import Device

        projections = project(found, trained_config(found), Device(found["header"]["work"]["options"]["device"]))
        for record in projections:
            write(record)
        console().print(_projection_table(projections))
        line("projected", "memory from each model's plan; time from counted operations at the measured rate")
    return 0 if all(run["stop_reason"] in FINISHED for run in found["runs"]) else 1


def max_batch(
    model: str | None,
    shape: str | None,
    layers: int | None,
    base_dtype: str,
    device: str | None,
    batches: Batches,
    json_file: str | None,
) -> int:
    """Searches for the largest batch with and without gradient checkpointing, and shows what batches take."""
    from wgpu_lora.bench.max_batch import find_max_batch
    from wgpu_lora.bench.step import chosen_model
    from wgpu_lora.gpu.device import Device

    write = _lines_to(json_file)
    opened = chosen_model(model, shape, layers, Device(device), base_dtype)
    found = find_max_batch(opened, batches, _Lines(write, _show_batch))
    console().print(_batch_table(found["rows"]))
    if not all(row["warmup"] for row in found["rows"]):
        line("*", "there was time for the first steps alone, in which kernels are compiled")
    for summary in found["summary"]:
        line("largest", _largest(summary))
    return 0


def _largest(summary: Record) -> str:
    ways = "with" if summary["gradient_checkpointing"] else "without"
    planned, confirmed = summary["planned"], summary["confirmed"]
    why = f" ({summary['why']})" if summary["why"] else ""
    bound = f"{ways} gradient checkpointing, limited by {summary['bounded_by']}{why}"
    if confirmed == planned:
        return f"{counted(planned, 'row')} {bound}; {'a step of them ran' if planned else 'not even one fits'}"
    if summary["not_run"] is None:
        return f"{counted(confirmed, 'row')} {bound}; {planned:,} by the plan"
    return f"{counted(planned, 'row')} by the plan, {bound}; {confirmed:,} ran: {summary['not_run']}"


def _lines_to(path: str | None) -> Callable[[Mapping[str, Any]], None]:
    """Appends each record to a new file as a line, at once: what was measured stays if a later part fails."""
    if path is None:
        return lambda record: None
    from wgpu_lora.bench.results import Writer

    return Writer(path).write


class _Lines(Events):
    """Writes each record, and shows it."""

    def __init__(self, *tell: Callable[[Mapping[str, Any]], None]):
        self._tell = tell

    def measured(self, record: Mapping[str, Any]) -> None:
        for tell in self._tell:
            tell(record)


def _show_batch(record: Mapping[str, Any]) -> None:
    if record["kind"] == "header":
        _show_device(record)
    elif record["kind"] == "batch":
        ways = "with" if record["gradient_checkpointing"] else "without"
        rows = f"{counted(record['batch'], 'row')} {ways} gradient checkpointing"
        line("measured", f"{rows}: {record['step_seconds']:.4f} s a step")


def _show_device(header: Mapping[str, Any]) -> None:
    device = header["device"]
    line("device", f"{device['name']}, {device['driver']}, {device['backend']}")


def _show_training(record: Mapping[str, Any]) -> None:
    from wgpu_lora.train.memory import readable

    if record["kind"] == "header":
        _show_device(record)
        work = record["work"]
        name = (
            f"recipe {work['recipe']}"
            if work["recipe"]
            else f"shape {work['shape']}, {counted(work['layers'], 'layer')}"
        )
        line("work", f"{name}; not counted: {record['excluded']}")
    elif record["kind"] == "run":
        memory = f"{readable(record['peak_allocated'])} of {readable(record['peak_planned'])} planned"
        line(
            "run",
            f"{record['number'] + 1}: {record['seconds']:.2f} s, {record['samples_per_second']:,.2f} samples/s, "
            f"{speed(record['trained_tokens_per_second'], record['tokens_per_second'], 1.0)}, "
            f"loss {_number(record['final_loss'])}, memory {memory}; {record['stop_reason']}",
        )
    else:
        console().print(_spread_table(record["spread"]))


def _spread_table(spreads: Record) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("over the runs")
    for name in ("median", "min", "max", "variance", "spread"):
        table.add_column(name, justify="right")
    for name, spread in spreads.items():
        cv = "one run" if spread["variance"] is None else _share(spread["cv"])
        values = [_number(spread[key]) for key in ("median", "min", "max", "variance")]
        table.add_row(SPREAD_NAMES.get(name, name.replace("_", " ")), *values, cv)
    return table


def _projection_table(records: list[Record]) -> Any:
    from rich.table import Table

    from wgpu_lora.train.memory import readable

    table = Table(box=None, pad_edge=False)
    for name in ("projected for", "memory", "fits here", "operations", "samples/s", "processed tokens/s", "seconds"):
        table.add_column(name, justify="left" if name == "projected for" else "right")
    for record in records:
        peak, fits = record["peak_planned"], {True: "yes", False: "no", None: "not known"}[record["fits"]]
        table.add_row(
            record["shape"],
            "not possible" if peak is None else readable(peak),
            fits,
            f"{record['times_the_operations']:.1f} x",
            f"{record['samples_per_second']:.3g}",
            f"{record['tokens_per_second']:.3g}",
            f"{record['seconds']:,.0f}",
        )
    return table


def _batch_table(rows: list[Record]) -> Any:
    from rich.table import Table

    from wgpu_lora.train.memory import readable

    table = Table(box=None, pad_edge=False)
    for name in ("batch", "checkpointing", "s a step", "processed tokens/s", "planned", "allocated"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            "yes" if row["gradient_checkpointing"] else "no",
            f"{row['step_seconds']:.4f}{'' if row['warmup'] else '*'}",
            f"{row['tokens_per_second']:,.0f}",
            readable(row["planned"]),
            readable(row["allocated"]),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
