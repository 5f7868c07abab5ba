"""The adapters of a run as tasks, from the command line and the cluster file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.cluster_file import A_NAME, ClusterFile, distinct_names, is_safe, safe_name
from wgpu_lora.cluster.cluster_paths import for_nodes
from wgpu_lora.cluster.messages import Task
from wgpu_lora.cluster.task_outputs import check_outputs, output_of
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import IN_FILE, error_source, flag, naming
from wgpu_lora.train.adapter_tasks import KEYS, OWN, AdapterTask, named_tasks, task_of
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values, named
from wgpu_lora.train.resolve_options import find_recipe, read_recipe

MAX_ADAPTERS = 10_000  # of a run
# Options that a task cannot have, and why.
REFUSED = {
    "device": "the cluster chooses the devices",
    "resume": "a run on a cluster continues by itself",
    "overwrite": "results of a run on a cluster go to a directory without any",
}


@dataclass(frozen=True)
class Draft:
    """A task before its directory has been checked. name: as given, or (`derived`) made of a directory or a recipe."""

    name: str
    derived: bool
    args: TrainingArguments


def gather_tasks(
    options: Mapping[str, Any],
    recipe: str | None = None,
    adapters: Sequence[str] = (),
    adapters_config: Path | None = None,
    file: ClusterFile | None = None,
    shared: str | None = None,
) -> list[Task]:
    """The tasks of a run, with names that differ and output directories that are free.

    What the command line names is trained instead of what the file names. Options of a table go before those of the
    command line, those before a recipe's, and those before [options] of the file.

    Args:
        options: of training, on the command line. recipe: over which they are.
        adapters: DATA:CHECKPOINT. adapters_config: a file of [[adapter]] tables.
        shared: the shared folder, if results go there.

    Raises:
        UserError: an option or a table is not allowed, there is nothing to train, or two tasks would write to one
            directory.
    """
    drafts = list(_drafts(options, recipe, adapters, adapters_config, file))
    if not drafts:
        raise UserError(
            f"There is nothing to train: give {flag('adapters')} DATA:CHECKPOINT, {flag('data')} with "
            f"{flag('output')}, a recipe, or a cluster file with [[adapter]] tables."
        )
    return tasks_of_drafts(drafts, file.data_root if file else None, shared)


def tasks_of_drafts(drafts: Sequence[Draft], root: str | None, shared: str | None) -> list[Task]:
    """Drafts as tasks. Raises UserError, as `gather_tasks`."""
    if len(drafts) > MAX_ADAPTERS:
        raise UserError(f"{len(drafts):,} adapters are more than {MAX_ADAPTERS:,}: split them into several runs.")
    tasks = []
    for name, draft in zip(_names(drafts), drafts, strict=True):
        assert draft.args.output
        task_options = for_nodes(as_options(draft.args), root)
        tasks.append(Task(name, task_options, output_of(draft.args.output, shared)))
    # The cluster's machines look into a shared folder that is not here.
    check_outputs(tasks, local=shared is None or Path(shared).is_dir())
    return tasks


def as_options(args: TrainingArguments) -> dict[str, Any]:
    """The options of a task: those that are not the defaults, without those that the cluster sets."""
    defaults = TrainingArguments().as_dict()
    left_out = ("output", *REFUSED)
    return {k: v for k, v in args.as_dict().items() if k not in left_out and v != defaults[k]}


def shared_arguments(
    options: Mapping[str, Any], recipe: str | None = None, file: ClusterFile | None = None
) -> TrainingArguments:
    """The options of all tasks: those of the command line, over a recipe's, over [options] of the file.

    Raises:
        UserError: one is not known or not allowed.
    """
    args = TrainingArguments()
    if file:
        where = f"{file.where}, [options]"
        with error_source(where, IN_FILE):
            if "output" in _allowed_values(file.options, where):
                raise UserError(f"{flag('output')} cannot be that of all adapters: give each its own.")
        args = from_values(file.options, where, args, IN_FILE)
    if recipe is not None:
        path = find_recipe(recipe)
        values = {key: value for key, value in read_recipe(path).items() if key not in REFUSED}
        args = from_values(values, f"The recipe {path}", args, IN_FILE)
    return from_values(_allowed_values(options, "The command line"), "The command line", args)


def _allowed_values(values: Mapping[str, Any], where: str, *extra_names: str) -> dict[str, Any]:
    """Values by the names of training's options and `extra_names`. Raises UserError if a task cannot have one."""
    by_name = named(values, where, *extra_names)
    for name in by_name.keys() & REFUSED.keys():
        raise UserError(f"{where}: {flag(name)} cannot be given, since {REFUSED[name]}: leave it out.")
    return by_name


def _drafts(
    options: Mapping[str, Any],
    recipe: str | None,
    adapters: Sequence[str],
    config: Path | None,
    file: ClusterFile | None,
) -> Iterator[Draft]:
    args = shared_arguments(options, recipe, file)
    if adapters or config:
        yield from _of_adapters(named_tasks(adapters, config), args)
    elif recipe or options.get("data"):
        if args.data is None:
            raise UserError(f"{flag('data')} is missing: the recipe {recipe} names no data.")
        if args.output is None:
            raise UserError(f"{flag('output')} is missing: name a directory for the result.")
        yield Draft(_directory_name(args.output), True, args)
    elif file:
        yield from _of_adapters([*_adapters_of(file)], args)
        yield from _of_recipes(file, options)


def _of_adapters(adapters: Sequence[AdapterTask], args: TrainingArguments) -> Iterator[Draft]:
    for task in adapters:
        for name in ("data", "output"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"{flag(name)} and {flag('adapters')} cannot be combined: every adapter names its own {name}."
                )
        if task.weight != 1 and not args.gradient_accumulation_steps:
            raise UserError(
                f"The adapter {task.name} has a 'weight', which is of one pipeline, but adapters of a cluster may be "
                f"trained apart: leave it out, or give {flag('gradient_accumulation_steps')}."
            )
        yield Draft(task.name, task.name == _directory_name(task.checkpoint), task.arguments(args))


def _adapters_of(file: ClusterFile) -> Iterator[AdapterTask]:
    """The [[adapter]] tables, in which any option of training is allowed."""
    extra_names = [item.name for item in fields(TrainingArguments) if item.name not in (*KEYS, *OWN)]
    for number, table in enumerate(file.adapter, 1):
        where = f"{file.where}, adapter {number}"
        task = task_of(table, where, *extra_names)
        with naming(IN_FILE):
            if "output" in _allowed_values(task.options, where):
                raise UserError(f"{where}: 'output' is called 'checkpoint' in [[adapter]] tables.")
        yield task


def _of_recipes(file: ClusterFile, options: Mapping[str, Any]) -> Iterator[Draft]:
    """The [[recipe]] tables: recipe, name, and options of training over its own."""
    for number, table in enumerate(file.recipe, 1):
        where = f"{file.where}, recipe {number}"
        with error_source(where, IN_FILE):
            values = _allowed_values(table, where, "recipe", "name")
            recipe, name = values.pop("recipe", None), values.pop("name", None)
            if not isinstance(recipe, str) or not recipe.strip():
                raise UserError("'recipe' must be a file of options, or the name of a bundled recipe.")
            if name is not None and not isinstance(name, str):
                raise UserError(f"'name' must be text, not {name!a:.60}.")
        args = from_values(values, where, shared_arguments(options, recipe, file), IN_FILE)
        for key in ("data", "output"):
            if getattr(args, key) is None:
                raise UserError(f"{where}: neither it nor the recipe {recipe} has '{key}': add it.")
        yield Draft(name or Path(recipe).stem, name is None, args)


def _directory_name(path: str) -> str:
    return os.path.basename(os.path.realpath(path))


def _names(drafts: Sequence[Draft]) -> list[str]:
    """Names of tasks that differ. Raises UserError if two given ones do not."""
    names_by_key: dict[str, str] = {}
    for name in [draft.name for draft in drafts if not draft.derived]:
        if not is_safe(name):
            raise UserError(f"The name of an adapter is {name!a:.80}, but must be {A_NAME}.")
        if twice := names_by_key.get(name.casefold()):
            raise UserError(
                f"Two adapters are named '{name}' and '{twice}': give each a 'name' of its own, which differs by more "
                "than its case."
            )
        names_by_key[name.casefold()] = name
    derived = iter(distinct_names([safe_name(draft.name) for draft in drafts if draft.derived], [*names_by_key]))
    return [next(derived) if draft.derived else draft.name for draft in drafts]
