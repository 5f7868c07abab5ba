"""wgpu-lora cluster sweep: a grid of options of training, the best first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar

import typer

from wgpu_lora.cli.cluster.options import (
    Address,
    ClusterToml,
    Dashboard,
    Detach,
    Here,
    RunCommand,
    run_options,
    with_run_options,
)
from wgpu_lora.cli.parameters import is_given, option_parameter, training_options, warn_unused
from wgpu_lora.cluster.spec.sweep_options import SWEEP, SweepOptions
from wgpu_lora.train.options.training_arguments import TrainingArguments

OWN = tuple(item.name for item in fields(SweepOptions))
Param = Annotated[
    list[str] | None,
    typer.Option(
        help="An option of training and its values; several make a grid. Semicolons separate values with commas.",
        metavar="NAME=VALUE,VALUE",
        rich_help_panel=SWEEP,
    ),
]


class SweepCommand(RunCommand):
    """A command that shows its own options in --help, and the most common ones of training."""

    most_used: ClassVar[Sequence[str]] = (
        "param",
        *OWN,
        *(name for name in RunCommand.most_used if not name.startswith("adapters")),
    )


def _sweep(ctx: typer.Context, given: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int:
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cli.cluster.running import run_tasks
    from wgpu_lora.cluster.client.connect import target
    from wgpu_lora.cluster.coordinator.asha import check_tune
    from wgpu_lora.cluster.spec.sweep import grid_of, sweep_tasks
    from wgpu_lora.cluster.spec.tasks import shared_arguments

    sweep = SweepOptions(**{name: values[name] for name in OWN if is_given(ctx, name)})
    if sweep.scheduler == "asha":
        check_tune()
    grid = grid_of(values["param"] or [])
    what = target(values["address"], values["file"], values["local"])
    options = run_options(ctx, values, what.file)
    args = shared_arguments(given, recipe, what.file)
    warn_unused(given.keys() - grid.values.keys(), args)
    root = what.file.data_root if what.file else None
    tasks = sweep_tasks(grid, sweep, args, root, options.shared)
    return run_tasks(what, tasks, options, sweep=sweep, detach=values["detach"], dashboard=values["dashboard"])


@with_run_options
def _command(
    args: TrainingArguments,
    note: str | None,
    param: Param = None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
    detach: Detach = False,
    dashboard: Dashboard = False,
    **options: Any,
) -> int:
    """Train an adapter for every combination of values, and list them, the best first.

    Adapters that differ only in what those of a pipeline may differ in are trained together on a device. The list is
    also in sweep.json in --output, beside the adapters' directories.
    """
    raise AssertionError("a sweep's tasks are made of the given options")


_command.__name__ = "sweep"
_parameters = inspect.signature(_command).parameters.values()
_command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_parameters, *map(option_parameter, fields(SweepOptions))]
)
sweep = training_options(_command, _sweep)
