"""Sweeps: a grid of options as tasks, and their results, the best first."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.cluster_file import LONGEST, SweepOptions, distinct_names, safe_name
from wgpu_lora.cluster.cluster_tasks import MAX_ADAPTERS, REFUSED, Draft, tasks_of_drafts
from wgpu_lora.cluster.messages import RunView, Snapshot, Task, TaskView
from wgpu_lora.cluster.task_outputs import output_of
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.memory import RunRequirements
from wgpu_lora.train.option_types import READERS, TYPES, kinds
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values, named

RESULTS = "sweep.json"
# Options that no task may vary, and why.
COMPARED = "the losses of its tasks could not be compared"
FIXED = {
    **REFUSED,
    **dict.fromkeys(("output", "goal", "notes", "run_log", "report_to"), "it does not change what is trained"),
    **dict.fromkeys(("eval_data", "eval_split", "validation_split", "objective"), COMPARED),
}
# Options whose values may change while an adapter is trained.
MUTABLE = (
    *("learning_rate", "weight_decay", "max_grad_norm", "lora_dropout", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("loraplus_lr_ratio", "label_smoothing", "beta", "ld_alpha", "cpo_alpha", "simpo_gamma"),
    *("desirable_weight", "undesirable_weight", "temperature", "kd_weight", "hard_top1_weight", "hard_full_weight"),
)


Grid = dict[str, list[Any]]  # values by option, in the order that they were given


def grid_size(grid: Grid) -> int:
    return math.prod(map(len, grid.values()))


def grid_point(grid: Grid, index: int) -> dict[str, Any]:
    """A combination of values; the last option varies first."""
    point = {}
    for name, values in reversed(grid.items()):
        index, value_index = divmod(index, len(values))
        point[name] = values[value_index]
    return dict(reversed(point.items()))


def grid_of(params: Sequence[str]) -> Grid:
    """The grid of NAME=V1,V2,... texts. Values that have commas themselves are separated by semicolons.

    Raises:
        UserError: a text or a value is not one, an option cannot be varied, or a value is repeated.
    """
    grid: Grid = {}
    for text in params:
        where = f"--param {text:.80}"
        name, equals, values_text = text.partition("=")
        parts = [part.strip() for part in values_text.split(";" if ";" in values_text else ",")]
        if not equals or not all(parts):
            raise UserError(f"{where} is not NAME=VALUE,VALUE, such as lora_r=8,16,32.")
        (option,) = named({name.strip(): None}, where)
        if option in FIXED:
            raise UserError(f"{where}: {flag(option)} cannot be varied, since {FIXED[option]}.")
        if option in grid:
            raise UserError(f"--param {flag(option)} is given twice: write all of its values in one.")
        grid[option] = [_value(option, part, where) for part in parts]
        for value in grid[option]:
            if grid[option].count(value) > 1:
                raise UserError(f"{where} has the value {value} twice: leave one out.")
    if not grid:
        raise UserError("A sweep needs something to vary: give --param NAME=VALUE,VALUE, such as lora_r=8,16,32.")
    return grid


def _value(name: str, text: str, where: str) -> Any:
    """A value by the type of its option."""
    (item,) = [option for option in fields(TrainingArguments) if option.name == name]
    parts = kinds(item)
    if "None" in parts and text.lower() == "none":
        return None
    kind = next(part for part in ("bool", "int", "float", "str") if part in parts)
    try:
        return READERS[kind](text)
    except (KeyError, ValueError):
        raise UserError(f"{where}: {flag(name)} must be {TYPES[kind]}, not {text!a:.40}.") from None


def sweep_tasks(
    grid: Grid, options: SweepOptions, args: TrainingArguments, root: str | None = None, shared: str | None = None
) -> list[Task]:
    """The tasks of a sweep, below the output directory of `args`, with their values as `params`.

    Raises:
        UserError: there are too many, data or an output directory is missing, or values are not allowed together.
    """
    if args.data is None:
        raise UserError(f"A sweep needs {flag('data')}: what it trains on.")
    if args.output is None:
        raise UserError(f"A sweep needs {flag('output')}: a directory.")
    if args.validation_split and "seed" in grid:
        raise UserError(
            f"--param seed and {setting('validation_split', args.validation_split)} cannot be combined, since the seed "
            f"chooses the held-out rows: give {flag('eval_data')}."
        )
    if Path(output_of(args.output, shared), RESULTS).exists():
        raise UserError(f"{args.output} already holds a sweep's {RESULTS}: choose another directory.")
    size = grid_size(grid)
    count = min(size, options.max_trials or size)
    if count > MAX_ADAPTERS:
        raise UserError(
            f"A grid of {size:,} adapters is more than {MAX_ADAPTERS:,}: give fewer values, or --max-trials."
        )
    points = [grid_point(grid, index) for index in sorted(random.Random(args.seed).sample(range(size), count))]
    names = distinct_names([_name(params, number, count) for number, params in enumerate(points, 1)])
    drafts = []
    for name, params in zip(names, points, strict=True):
        where = f"--param {' '.join(f'{key}={value}' for key, value in params.items())}"
        drafts.append(Draft(name, False, from_values({**params, "output": f"{args.output}/{name}"}, where, args)))
    tasks = tasks_of_drafts(drafts, root, shared)
    return [replace(task, params=params) for task, params in zip(tasks, points, strict=True)]


def _name(params: Mapping[str, Any], number: int, count: int) -> str:
    name = safe_name("_".join(f"{key}-{value}" for key, value in params.items()))
    whole = sum(len(f"{key}-{value}_") for key, value in params.items()) - 1
    return name if len(name) == whole <= LONGEST else f"trial-{number:0{len(str(count))}}"


def plan_sweep(
    options: SweepOptions, tasks: Sequence[Task], plans: Mapping[str, Mapping[str, RunRequirements]]
) -> tuple[SweepOptions, list[Task]]:
    """The options with the interval of the scheduler, which has held-out losses measured when it compares, and tasks.

    Args:
        plans: by task and plan class.

    Raises:
        UserError: the metric is not measured, the tasks are too short to compare, or an option cannot be mutated.
    """
    by_task = {task.name: [*plans.get(task.name, {}).values()] for task in tasks}
    unmeasured = next((name for name, of_task in by_task.items() if not all(plan.heldout for plan in of_task)), None)
    if options.metric == "eval_loss" and unmeasured:
        raise UserError(
            f"{setting('metric', options.metric)} needs held-out rows, but {unmeasured} has none: give "
            f"{flag('eval_data')} or {flag('validation_split')}, or {setting('metric', 'loss')}."
        )
    steps = [plan.steps for of_task in by_task.values() for plan in of_task]
    if options.scheduler == "none":
        return options, list(tasks)
    if not all(steps):
        raise UserError(
            f"{setting('scheduler', options.scheduler)} compares adapters by steps, but these end by time: give "
            f"{flag('max_steps')} instead of {flag('target_seconds')}."
        )
    name = "grace_period" if options.scheduler == "asha" else "perturbation_interval"
    interval = getattr(options, name) or max(1, min(steps, default=1) // 10)
    if interval >= max(steps, default=interval + 1):
        raise UserError(
            f"{setting(name, interval)} leaves nothing to compare, since the longest adapter has {max(steps):,} steps: "
            "give a smaller one."
        )
    defaults: dict[str, Any] = {"eval_steps": interval} if options.metric == "eval_loss" else {}
    if options.scheduler == "pbt":
        fixed_params = sorted({param for task in tasks for param in task.params} - set(MUTABLE))
        if fixed_params:
            choices = ", ".join(map(flag, MUTABLE))
            raise UserError(
                f"--param {flag(fixed_params[0])} cannot be varied with {setting('scheduler', 'pbt')}, which changes "
                f"it for adapters that are being trained: choose among {choices}, or another scheduler."
            )
        defaults["save_steps"] = interval  # what others copy
    tasks = [replace(task, options={**defaults, **task.options}) for task in tasks]
    changes: dict[str, Any] = {name: interval}
    return replace(options, **changes), tasks


VERSION = 1  # of sweep.json
PROGRESS = ("step", "total_steps", "loss", "eval_loss", "best_eval_loss")  # in it


def value_of(view: TaskView, metric: str) -> float | None:
    """What a task is compared by: its best held-out loss, of which best/ is, or its last training loss."""
    progress = view.progress
    if metric == "loss":
        return progress.loss
    return progress.best_eval_loss if progress.best_eval_loss is not None else progress.eval_loss


def ranked(views: Sequence[TaskView], metric: str) -> list[TaskView]:
    """The tasks, the best first; failed ones and those without a value come last, by name."""

    def rank(view: TaskView) -> tuple[float, str]:
        value = value_of(view, metric)
        usable = value is not None and math.isfinite(value) and view.state != "failed"
        return value if usable and value is not None else math.inf, view.name

    return sorted(views, key=rank)


def write_results(snapshot: Snapshot, run: RunView) -> Path:
    """Write sweep.json beside the outputs; into the working directory, if these are in a folder that is not here.

    Raises:
        UserError: it cannot be written.
    """
    sweep = run.sweep or SweepOptions()
    views = ranked([view for view in snapshot.tasks if view.run == run.name], sweep.metric)
    adapters = [
        {
            "rank": rank,
            "name": view.name,
            "params": view.params,
            "value": value_of(view, sweep.metric),
            "state": view.state,
            **{key: getattr(view.progress, key) for key in PROGRESS},
            "output": view.output,
            "reason": view.reason,
        }
        for rank, view in enumerate(views, 1)
    ]
    result = {
        "version": VERSION,
        "run": run.name,
        "metric": sweep.metric,
        "scheduler": sweep.scheduler,
        "over": run.over,
        "adapters": adapters,
    }
    parent = Path(os.path.commonpath([os.path.dirname(view.output) for view in views]) if views else ".")
    path = (parent if parent.is_dir() else Path()) / RESULTS
    try:
        write_bytes_atomic(path, (to_json(result, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({reason(error)}): mend that for other sweeps, and see the table for its values."
        ) from None
    return path
