"""wgpu-lora bench max-batch: the largest batch of a training step, and the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.bench import ComputeDtype, File, Layers, Model, Rank, Shape, Tokens
from wgpu_lora.cli.console import console, line, table
from wgpu_lora.cli.parameters import BaseDtype, Device, Goal, InRunLog, Notes
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.names.text import count_noun
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

if TYPE_CHECKING:
    from wgpu_lora.bench.brick_results import Writer

Record = Mapping[str, Any]
BATCHES = ("batch", "checkpointing", "s/step", "tokens/s", "loss", "planned", "allocated", "status")
KEY = """\
tokens/s: processed tokens, including padding. loss: of the last step.
OK: steps ran. MAX: the largest that runs. OOM: does not fit into memory, or a limit of the device refuses it."""


def max_batch(
    model: Model = None,
    shape: Shape = None,
    layers: Layers = None,
    tokens: Tokens = 512,
    rank: Rank = 16,
    base_dtype: BaseDtype = DEFAULT_FORMAT,
    compute_dtype: ComputeDtype = "f32",
    most: Annotated[
        int | None, typer.Option("--max-batch", help="Maximum rows; by default, as many as fit. [x>=1]")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Rows to try instead, separated by commas, for example 1,2,4,8.")
    ] = None,
    memory_limit: Annotated[int | None, typer.Option(help="Maximum bytes to use. [x>=1]")] = None,
    time_limit: Annotated[
        float, typer.Option(help="Seconds to run batches, each with and without checkpointing. [x>0]")
    ] = 600.0,
    device: Device = None,
    json: File = None,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
) -> int:
    """Find the largest and the fastest batch of a training step, with and without gradient checkpointing.

    The memory plan gives the upper limit; then steps are trained at several batch sizes up to it.
    """
    from wgpu_lora.bench.batch_search import Batches, find_max_batch
    from wgpu_lora.bench.brick_results import Writer
    from wgpu_lora.bench.training_step import ROW, benchmark_option_names, chosen_model
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.train.options.training_arguments import TrainingArguments
    from wgpu_lora.train.track.run_recorder import remarks

    with benchmark_option_names(ROW):
        args = TrainingArguments(max_length=tokens, lora_r=rank, base_dtype=base_dtype, compute_dtype=compute_dtype)
    batches = Batches(args, most, memory_limit, time_limit, _sizes(batch_sizes))
    with Writer(json) as writer, remarks(goal, notes, run_log):
        opened = chosen_model(model, shape, layers, OpenedDevice(device), base_dtype)
        result = find_max_batch(opened, batches, _Noted(writer))
    console().print(table(BATCHES, map(_cells, result["rows"]), ("status",), map(_style, result["rows"])))
    console().print(f"\n{KEY}\n", style="dim")
    if any(row["warmup"] == 0 for row in result["rows"]):
        line("*", "there was only time for the first steps, which include compilation")
    for summary in result["summary"]:
        line("largest", _largest(summary))
    for label, text in _best(result["best"]):
        line(label, text)
    return 0


def _sizes(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in (text or "").split(",") if part.strip() or text}))
    except ValueError:
        raise UserError(f"--batch-sizes must be numbers of rows such as 1,2,4,8, not {text!r:.80}.") from None


# -- what is shown -----------------------------------------------------------------------------------------------------


def _way(record: Record) -> str:
    return f"{'with' if record['gradient_checkpointing'] else 'without'} gradient checkpointing"


def _largest(summary: Record) -> str:
    planned_rows, confirmed_rows = summary["planned"], summary["confirmed"]
    why = f" ({summary['why']})" if summary["why"] else ""
    bound = f"{_way(summary)}, limited by {summary['bounded_by']}{why}"
    if not planned_rows:
        return f"none fits {bound}"
    if confirmed_rows == planned_rows:
        return f"{count_noun(planned_rows, 'row')} {bound}; a step of them ran"
    if summary["not_run"] is None:
        return f"{count_noun(confirmed_rows, 'row')} {bound}; {planned_rows:,} by the plan"
    return f"{count_noun(planned_rows, 'row')} by the plan, {bound}; {confirmed_rows:,} ran: {summary['not_run']}"


def _best(record: Record) -> list[tuple[str, str]]:
    fastest = record["fastest"]
    if not fastest:
        return []
    rows = count_noun(fastest["batch"], "row")
    text = [("fastest", f"{rows} {_way(fastest)}: {fastest['tokens_per_second']:,.0f} tokens/s")]
    for pair in record["checkpointing"][-1:]:
        time = "" if pair["time"] is None else f"{pair['time']:.2f} times the time and "
        rows, verb = count_noun(pair["batch"], "row"), "takes" if pair["batch"] == 1 else "take"
        text.append(
            ("compared", f"with gradient checkpointing, {rows} {verb} {time}{pair['memory']:.2f} times the memory")
        )
    return text


class _Noted(Events):
    """Writes each record, and shows batches as soon as they have run."""

    def __init__(self, writer: Writer):
        self._writer = writer

    def measured(self, record: Record) -> None:
        self._writer.write(record)
        if record["kind"] == "header":
            device = record["device"]
            line("device", f"{device['name']}, {device['driver']}, {device['backend']}")
        elif record["kind"] == "batch" and record["step_seconds"] is not None:
            rows = count_noun(record["batch"], "row")
            line("measured", f"{rows} {_way(record)}: {record['step_seconds']:.4f} s per step")


def _cells(row: Record) -> tuple[str, ...]:
    from wgpu_lora.train.memory import format_bytes

    def number(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    return (
        str(row["batch"]),
        "yes" if row["gradient_checkpointing"] else "no",
        f"{number('step_seconds', '.4f')}{'*' * (row['warmup'] == 0)}",
        number("tokens_per_second", ",.0f"),
        number("loss", ".4f"),
        "" if row["planned"] is None else format_bytes(row["planned"]),
        "" if row["allocated"] is None else format_bytes(row["allocated"]),
        row["status"],
    )


def _style(row: Record) -> str | None:
    return {"MAX": "green", "OOM": "red"}.get(row["status"])
