"""The adapters of a pipeline: --adapters DATA:CHECKPOINT, and adapters.toml."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import Source
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_toml
from wgpu_lora.files.paths import check_links, is_path
from wgpu_lora.names.aliases import real_names
from wgpu_lora.names.spelling import IN_FILE, flag, naming, with_renamed_options
from wgpu_lora.train.options.option_fields import DISTILLATION, PREFERENCES, REWARDS
from wgpu_lora.train.options.training_arguments import PATHS, TrainingArguments, from_values
from wgpu_lora.train.run.resume import resolve_recorded_path

# Keys of an [[adapter]] table, and the corresponding training options.
OPTIONS = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "epochs": "num_train_epochs",
    **{
        f.name: f.name for f in fields(TrainingArguments) if f.metadata["panel"] in (PREFERENCES, DISTILLATION, REWARDS)
    },
    **{
        name: name
        for name in (
            "objective",
            "objective_args",
            "target_modules",
            "use_dora",
            "init_lora_weights",
            "learning_rate",
            "loraplus_lr_ratio",
            "max_steps",
            "max_length",
        )
    },
    **{name: name for name in ("eval_data", "split", "eval_split", "dataset_config", "init_adapter")},
    "validation_split": "validation_split",
}
KEYS = {option: key for key, option in OPTIONS.items()}
OWN = ("data", "checkpoint", "name", "weight")
MAX_WEIGHT = 1_000_000


@dataclass(frozen=True)
class AdapterTask:
    """One adapter of a pipeline.

    name: by default that of the checkpoint directory. weight: batches per step, relative to an adapter of weight 1.
    options: the adapter's own training options, by the names of TrainingArguments. rows: rows from Python, by data and
        eval_data.
    """

    data: str
    checkpoint: str
    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Source] = field(default_factory=dict)

    def arguments(self, base: TrainingArguments) -> TrainingArguments:
        """The options of a single run that trains this adapter as the pipeline does.

        Batches per step stay unset if `base` does not set them: `train.training_data` chooses them by the weight.
        """
        accumulation = base.gradient_accumulation_steps
        if accumulation and accumulation * self.weight < 1:
            raise UserError(
                f"The adapter {self.name} of weight {self.weight:g} has less than one batch per step: set "
                f"{flag('gradient_accumulation_steps')} to at least {math.ceil(1 / self.weight)}, or raise the weight."
            )
        if {"eval_data", "eval_split"} & self.options.keys():  # held-out rows of the adapter take precedence
            base = replace(base, validation_split=None)
        args = from_values(self.options, f"The adapter {self.name}", base, with_renamed_options(KEYS, IN_FILE))
        batches = round(accumulation * self.weight) if accumulation else None
        return replace(args, data=self.data, output=self.checkpoint, gradient_accumulation_steps=batches)


def task_of(values: Mapping[str, Any], where: str, *extra: str) -> AdapterTask:
    """Create a task from the keys of an [[adapter]] table.

    Args:
        where: begins error messages. extra: training options that the table may have besides OPTIONS.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type.
    """
    values = _by_keys(values, where, extra)
    for key in ("data", "checkpoint", "name"):
        text = values.get(key, "some")
        if not (isinstance(text, str | Path) and str(text).strip() and is_path(str(text))):
            raise UserError(f"{where}: '{key}' must be UTF-8 text, neither empty nor too long, not {text!a:.80}.")
    for key in ("data", "checkpoint"):
        if key not in values:
            raise UserError(f"{where} has no '{key}': every adapter needs its data and a checkpoint directory.")
    weight = values.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
        raise UserError(
            f"{where}: 'weight' must be a number greater than 0 and at most {MAX_WEIGHT:,}, not {weight!r:.80}."
        )
    checkpoint = str(values["checkpoint"])
    options = {OPTIONS.get(key, key): _plain(value) for key, value in values.items() if key not in OWN}
    name = values.get("name") or os.path.basename(os.path.realpath(checkpoint))  # pathlib refuses links in a circle
    return AdapterTask(str(values["data"]), checkpoint, name, float(weight), options)


def _by_keys(values: Mapping[str, Any], where: str, extra: Sequence[str]) -> dict[str, Any]:
    """A table's values by the names in OWN and OPTIONS; option names, also of other programs, are accepted."""
    result: dict[str, Any] = {}
    with naming(IN_FILE):
        otherwise = f"choose among {', '.join([*OWN, *OPTIONS])}{' and the options of training' if extra else ''}."
        options = real_names(values, [*OWN, *OPTIONS, *KEYS, *extra], where, "key", otherwise)
    for name, value in options.items():
        key = KEYS.get(name, name)
        if key in result:
            raise UserError(f"{where}: '{key}' and '{name}' are the same key: leave one out.")
        result[key] = value
    return result


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def task_of_pair(text: str) -> AdapterTask:
    """Create a task from DATA:CHECKPOINT.

    Raises:
        UserError: there is not exactly one colon, or one side is empty.
    """
    data, colon, checkpoint = text.partition(":")
    if not colon or not data.strip() or not checkpoint.strip():
        raise UserError(f"--adapters {text} is not DATA:CHECKPOINT, such as data/a.jsonl:checkpoints/a.")
    if ":" in checkpoint:
        raise UserError(
            f"--adapters {text} has more than one colon, so the end of the data's path is ambiguous: put paths with a "
            "colon into a file for --adapters-config."
        )
    return task_of({"data": data, "checkpoint": checkpoint}, f"--adapters {text}")


def read_tasks(path: Path) -> list[AdapterTask]:
    """Read the [[adapter]] tables of a TOML file; relative paths refer to the working directory, as in a recipe.

    Raises:
        UserError: the file cannot be read, is not valid TOML, or has a key that is unknown, missing or invalid.
    """
    values = read_toml(path, "The adapters file")
    tables = values.pop("adapter", [])
    if values:
        raise UserError(f"{path} has an unknown key '{next(iter(values))}': only [[adapter]] tables belong there.")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{path} has no [[adapter]] table: write one for every adapter.")
    return [task_of(table, f"{path}: adapter {number}") for number, table in enumerate(tables, 1)]


def named_tasks(pairs: Sequence[str], config: Path | None) -> list[AdapterTask]:
    """The adapters given by --adapters and --adapters-config. Raises UserError."""
    return [*map(task_of_pair, pairs), *(read_tasks(config) if config else [])]


def request_of(tasks: Sequence[AdapterTask], home: Path) -> list[dict[str, Any]]:
    """The tasks for a pipeline's record, with checkpoints relative to it."""
    result = []
    for task in tasks:
        values = {name: value for name, value in vars(task).items() if name != "rows"}
        checkpoint = os.path.relpath(Path(task.checkpoint), home)
        result.append({**values, "options": dict(task.options), "checkpoint": checkpoint})
    return result


def tasks_of_request(request: Mapping[str, Any], home: Path) -> list[AdapterTask]:
    """The tasks in a pipeline's record, with paths as seen from here.

    Raises:
        UserError: the record does not have them.
    """
    tasks = []
    for number, text in enumerate(request["adapters"], 1):
        options = text.get("options") if isinstance(text, dict) else None
        if not isinstance(options, dict):
            raise UserError(
                f"The record of the pipeline in {home} has no adapter {number}: name all with {flag('adapters')}."
            )
        task = task_of({k: v for k, v in text.items() if k != "options"}, f"The record in {home}")
        began_in, task_options = request.get("directory"), {k: v for k, v in options.items() if k in OPTIONS.values()}
        task_options = {**task.options, **task_options}  # version 0.1.0 stored the objective beside the options
        task_options |= {
            name: resolve_recorded_path(began_in, task_options[name]) for name in PATHS if task_options.get(name)
        }
        data = resolve_recorded_path(began_in, task.data) or task.data
        checkpoint = os.path.relpath(os.path.normpath(home / task.checkpoint))
        tasks.append(replace(task, data=data, checkpoint=checkpoint, options=task_options))
    return tasks


def uniquely_named(tasks: Sequence[AdapterTask]) -> list[AdapterTask]:
    """The tasks, where those with the same name as another are renamed to their whole paths."""
    names = [task.name for task in tasks]
    return [
        replace(task, name=task.checkpoint)
        if names.count(task.name) > 1 and task.name == Path(task.checkpoint).resolve().name
        else task
        for task in tasks
    ]


def check_distinct(tasks: Sequence[AdapterTask]) -> None:
    """Raise UserError if two adapters have the same name, or would write to the same directory."""
    check_distinct_directories([(task.name, task.checkpoint) for task in tasks])
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two adapters are named '{twice}': give each a 'name' of its own in the adapters file.")


def check_distinct_directories(adapters: Sequence[tuple[str, str]], *, ignore_case: bool = False) -> None:
    """Raise UserError if two adapters, by name and directory, would write to the same directory."""
    owners: dict[Path, tuple[str, str]] = {}
    for name, directory in adapters:
        check_links(Path(directory))
        path = Path(directory).resolve()
        if path.exists() and not path.is_dir():
            raise UserError(f"The directory {directory} of adapter '{name}' is a file: choose another.")
        path = Path(str(path).casefold()) if ignore_case else path
        if path in owners:
            raise UserError(
                f"{directory} is the directory of adapter '{owners[path][0]}' and adapter '{name}': give each its own."
            )
        owners[path] = name, directory
    for path, (name, directory) in owners.items():
        if around := next((owners[parent] for parent in path.parents if parent in owners), None):
            raise UserError(
                f"{directory}, the directory of adapter '{name}', is inside another adapter's directory, {around[1]}: "
                "put them side by side."
            )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Training options as those that an adapter of a pipeline may set, `data` among them, and those that all share."""
    names = {"data", *OPTIONS.values()}
    adapter_options = {name: value for name, value in options.items() if name in names}
    return adapter_options, {name: value for name, value in options.items() if name not in names}
