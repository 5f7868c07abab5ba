"""Sweeps: a grid of options as tasks, and their results, the best first."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.cluster_file import LONGEST, MAX_TRIALS, SweepOptions, safe_name, told_apart
from wgpu_lora.cluster.cluster_tasks import REFUSED, Draft, finished
from wgpu_lora.cluster.messages import RunView, Snapshot, Sweep, Task, TaskView
from wgpu_lora.cluster.task_outputs import output_of
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import to_json
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


@dataclass(frozen=True)
class Grid:
    """Values of options. values: by option, in the order that they were given."""

    values: dict[str, list[Any]]

    @property
    def size(self) -> int:
        return math.prod(map(len, self.values.values()))

    def at(self, index: int) -> dict[str, Any]:
        """A combination; the last option varies first."""
        found = {}
        for name, values in reversed(self.values.items()):
            index, which = divmod(index, len(values))
            found[name] = values[which]
        return {name: found[name] for name in self.values}


def grid_of(params: Sequence[str]) -> Grid:
    """The grid of NAME=V1,V2,... texts. Values that have commas themselves are separated by semicolons.

    Raises:
        UserError: a text or a value is not one, an option cannot be varied, or a value is repeated.
    """
    values: dict[str, list[Any]] = {}
    for text in params:
        name, equals, rest = text.partition("=")
        parts = [part.strip() for part in rest.split(";" if ";" in rest else ",")]
        if not equals or not all(parts):
            raise UserError(f"--param {text:.80} is not NAME=VALUE,VALUE, such as lora_r=8,16,32.")
        (real,) = named({name.strip(): None}, f"--param {text:.80}")
        if real in FIXED:
            raise UserError(f"--param {text:.80}: {flag(real)} cannot be varied, since {FIXED[real]}.")
        if real in values:
            raise UserError(f"--param {flag(real)} is given twice: write all of its values in one.")
        values[real] = [_value(real, part, f"--param {text:.80}") for part in parts]
        twice = next((v for v in values[real] if values[real].count(v) > 1), None)
        if twice is not None:
            raise UserError(f"--param {text:.80} has the value {twice} twice: leave one out.")
    if not values:
        raise UserError("A sweep needs something to vary: give --param NAME=VALUE,VALUE, such as lora_r=8,16,32.")
    return Grid(values)


def _value(name: str, text: str, where: str) -> Any:
    """A value by the type of its option."""
    (item,) = [one for one in fields(TrainingArguments) if one.name == name]
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
    for name in ("data", "output"):
        if getattr(args, name) is None:
            raise UserError(f"A sweep needs {flag(name)}: {'what it trains on' if name == 'data' else 'a directory'}.")
    if args.validation_split and "seed" in grid.values:
        raise UserError(
            f"--param seed and {setting('validation_split', args.validation_split)} cannot be combined, since the seed "
            f"chooses the held-out rows: give {flag('eval_data')}."
        )
    assert args.output
    if Path(output_of(args.output, shared), RESULTS).exists():
        raise UserError(f"{args.output} already holds a sweep's {RESULTS}: choose another directory.")
    count = min(grid.size, options.max_trials or grid.size)
    if count > MAX_TRIALS:
        raise UserError(
            f"A grid of {grid.size:,} adapters is more than {MAX_TRIALS:,}: give fewer values, or --max-trials."
        )
    indices = sorted(random.Random(args.seed).sample(range(grid.size), count))
    found = [grid.at(index) for index in indices]
    names = told_apart([_name(params, number, count) for number, params in enumerate(found, 1)])
    drafts = []
    for name, params in zip(names, found, strict=True):
        where = f"--param {' '.join(f'{key}={value}' for key, value in params.items())}"
        drafts.append(Draft(name, True, from_values({**params, "output": f"{args.output}/{name}"}, where, args)))
    return [replace(task, params=params) for task, params in zip(finished(drafts, root, shared), found, strict=True)]


def _name(params: Mapping[str, Any], number: int, count: int) -> str:
    name = safe_name("_".join(f"{key}-{value}" for key, value in params.items()))
    whole = sum(len(f"{key}-{value}_") for key, value in params.items()) - 1
    return name if len(name) == whole <= LONGEST else f"trial-{number:0{len(str(count))}}"


def planned(
    options: SweepOptions, tasks: Sequence[Task], plans: Mapping[str, Mapping[str, RunRequirements]]
) -> tuple[Sweep, list[Task]]:
    """How the tasks are compared, by what their plans say; a scheduler has held-out losses measured when it compares.

    Args:
        plans: by task and plan class.

    Raises:
        UserError: the metric is not measured, the tasks are too short to compare, or an option cannot be mutated.
    """
    known = {task.name: [plan for plan in plans.get(task.name, {}).values() if not plan.refused] for task in tasks}
    blind = [name for name, found in known.items() if any(not plan.heldout for plan in found)]
    if options.metric == "eval_loss" and blind:
        raise UserError(
            f"{setting('metric', options.metric)} needs held-out rows, but {blind[0]} has none: give "
            f"{flag('eval_data')} or {flag('validation_split')}, or {setting('metric', 'loss')}."
        )
    steps = [plan.steps for found in known.values() for plan in found]
    sweep = Sweep(options.metric, options.scheduler, options.grace_period or 1, options.reduction_factor)
    if options.scheduler == "none":
        return sweep, list(tasks)
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
        fixed = sorted({param for task in tasks for param in task.params} - set(MUTABLE))
        if fixed:
            raise UserError(
                f"--param {flag(fixed[0])} cannot be varied with {setting('scheduler', 'pbt')}, which changes it for "
                f"adapters that are being trained: choose among {', '.join(map(flag, MUTABLE))}, or another scheduler."
            )
        defaults["save_steps"] = interval  # what others copy
    tasks = [replace(task, options={**defaults, **task.options}) for task in tasks]
    return replace(sweep, grace_period=interval, perturbation_interval=interval), list(tasks)


VERSION = 1


def value_of(view: TaskView, metric: str) -> float | None:
    """What a task is compared by: its best held-out loss, of which best/ is, or its last training loss."""
    said = view.progress
    if metric == "loss":
        return said.loss
    return said.best_eval_loss if said.best_eval_loss is not None else said.eval_loss


def ranked(views: Sequence[TaskView], metric: str) -> list[TaskView]:
    """The tasks, the best first; failed ones and those without a value come last, by name."""

    def place(view: TaskView) -> tuple[bool, float, str]:
        value = value_of(view, metric)
        usable = value is not None and math.isfinite(value) and view.state != "failed"
        return not usable, value if usable and value is not None else 0.0, view.name

    return sorted(views, key=place)


def results(snapshot: Snapshot, run: RunView) -> dict[str, Any]:
    """The content of sweep.json."""
    metric = run.sweep.metric if run.sweep else "eval_loss"
    views = ranked([view for view in snapshot.tasks if view.run == run.name], metric)
    return {
        "version": VERSION,
        "run": run.name,
        "metric": metric,
        "scheduler": run.sweep.scheduler if run.sweep else "none",
        "over": run.over,
        "adapters": [
            {
                "rank": rank,
                "name": view.name,
                "params": view.params,
                "value": value_of(view, metric),
                "state": view.state,
                "step": view.progress.step,
                "total_steps": view.progress.total_steps,
                "loss": view.progress.loss,
                "eval_loss": view.progress.eval_loss,
                "best_eval_loss": view.progress.best_eval_loss,
                "output": view.output,
                "reason": view.reason,
            }
            for rank, view in enumerate(views, 1)
        ],
    }


def write_results(snapshot: Snapshot, run: RunView) -> Path:
    """Write sweep.json beside the outputs; into the working directory, if these are in a folder that is not here.

    Raises:
        UserError: it cannot be written.
    """
    found = results(snapshot, run)
    outputs = [one["output"] for one in found["adapters"]]
    beside = Path(os.path.commonpath([os.path.dirname(output) for output in outputs]) if outputs else ".")
    path = (beside if beside.is_dir() else Path()) / RESULTS
    try:
        write_bytes_atomic(path, (to_json(found, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({reason(error)}): mend that for other sweeps, and see the table for its values."
        ) from None
    return path
