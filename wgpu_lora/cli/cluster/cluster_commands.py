"""The commands of wgpu-lora cluster. What they need is imported when they run, since that takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from wgpu_lora.cli.cluster.options import (
    Address,
    ClusterToml,
    Dashboard,
    Detach,
    Here,
    RunCommand,
    run_options,
    with_options,
)
from wgpu_lora.cli.console import line, print_json
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig
from wgpu_lora.cli.parameters import Json, is_given, training_options, warn_unused
from wgpu_lora.cluster.cluster_file import SWEEP, RunOptions, SweepOptions
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import program
from wgpu_lora.train.options.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.cluster.cluster_connection import Cluster

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run; needed only if several go on.")]


def _connected(address: str | None, file: Path | None, local: bool) -> AbstractContextManager[Cluster]:
    from wgpu_lora.cluster.cluster_connection import connected, target

    return connected(target(address, file, local))


def attach(run: Run = None, address: Address = None, file: ClusterToml = None, local: Here = False) -> int:
    """Show a run that goes on, and fetch what has ended meanwhile."""
    from wgpu_lora.cluster.cluster_connection import target

    where = target(address, file, local)
    from wgpu_lora.cli.cluster.run_driver import attach_to

    return attach_to(where, run)


def status(address: Address = None, file: ClusterToml = None, local: Here = False, as_json: Json = False) -> int:
    """Show machines, devices, leases of their memory, runs and speeds."""
    with _connected(address, file, local) as cluster:
        from wgpu_lora.cli.cluster.run_table import show_status
        from wgpu_lora.cluster import run_status
        from wgpu_lora.cluster.preflight import SURVEY_SECONDS

        cluster.controller("nodes", seconds=SURVEY_SECONDS)  # as they are now
        snapshot = run_status.snapshot_of(cluster)
    if as_json:
        print_json(run_status.as_json(snapshot))
    else:
        show_status(snapshot)
    return 0


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as 'cluster status' shows it.")],
    task: Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="Only this adapter of it.")] = None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """End a run, or one adapter of it. What was trained until the last checkpoint can still be fetched by 'attach'."""
    with _connected(address, file, local) as cluster:
        cluster.controller("cancel", run, task)
    line("cancelled", f"{run}, {task}" if task else run)
    return 0


def release(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its HOST:INDEX of 'cluster status', or its key.")],
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """Use a device again that was put aside because jobs failed on it."""
    with _connected(address, file, local) as cluster:
        from wgpu_lora.cluster.run_status import chosen_device, device_labels, snapshot_of

        snapshot = snapshot_of(cluster)
        labels = device_labels(snapshot)
        facts = chosen_device([(labels[view.facts.id], view.facts) for view in snapshot.devices], device)
        cluster.controller("release", facts.id)
    line("released", f"{labels[facts.id]}, {facts.name}")
    return 0


def resources() -> None:
    """Print this machine's devices for 'ray start --resources', as JSON.

    A node that is started by hand belongs to the cluster with its devices by:
    ray start --address HOST:PORT --resources "$(wgpu-lora cluster resources)"
    """
    from wgpu_lora.cluster.device_resources import advertised, node_devices

    print_json(advertised(node_devices("")))


File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The cluster.toml that names the hosts.")]


def up(file: File) -> None:
    """Start Ray on the hosts of a cluster.toml.

    It is started by SSH, where it does not run yet. docs/cluster-hosts.md describes what the hosts need.
    """
    from wgpu_lora.cluster.cluster_connection import check_ray
    from wgpu_lora.cluster.cluster_file import read_cluster_file
    from wgpu_lora.cluster.launch.launcher import up

    check_ray()
    up(read_cluster_file(file), line)


def down(file: ClusterToml = None, local: Here = False) -> None:
    """End Ray and all jobs on the hosts of a cluster file, or on this machine. Checkpoints and results stay."""
    from wgpu_lora.cluster.cluster_connection import check_ray
    from wgpu_lora.cluster.cluster_file import read_cluster_file
    from wgpu_lora.cluster.controller.state_file import unfinished_runs
    from wgpu_lora.cluster.launch.launcher import down
    from wgpu_lora.cluster.launch.local_ray import end_local

    if local is (file is not None):
        raise UserError("Give either -f cluster.toml or --local: the cluster to end.")
    if file is None:
        ended = end_local()
        line("ended", "Ray on this machine" if ended else "nothing: Ray does not run on this machine")
        if ended and (runs := unfinished_runs()):
            line("unfinished", f"{', '.join(runs)}: '{program()} cluster attach --local' goes on")
        return
    check_ray()
    down(read_cluster_file(file), line)


def _run(ctx: typer.Context, training: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int:
    from wgpu_lora.cluster.cluster_connection import target

    where = target(values["address"], values["file"], values["local"])
    from wgpu_lora.cli.cluster.run_driver import run_tasks
    from wgpu_lora.cluster.cluster_tasks import gather_tasks, shared_arguments

    options = run_options(ctx, values, where.file)
    config = values["adapters_config"]
    tasks = gather_tasks(training, recipe, values["adapters"] or [], config, where.file, options.shared)
    warn_unused(training, shared_arguments(training, recipe, where.file))
    return run_tasks(where, tasks, options, detach=values["detach"], dashboard=values["dashboard"])


@partial(training_options, instead=_run)
@with_options(RunOptions)
def run(
    args: TrainingArguments,
    note: str | None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    detach: Detach = False,
    dashboard: Dashboard = False,
    **options: Any,
) -> int:
    """Train adapters on the devices of a cluster, each where it fits and is done soonest.

    All of them are shown in one table. Ctrl-C leaves them running: 'attach' comes back, 'cancel' ends them. Everything
    that can be refused is refused before anything runs.
    """
    raise AssertionError("cluster tasks are gathered from the given options")


SWEEP_FIELDS = tuple(item.name for item in fields(SweepOptions))
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
        *SWEEP_FIELDS,
        *(name for name in RunCommand.most_used if not name.startswith("adapters")),
    )


def _sweep(ctx: typer.Context, training: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int:
    from wgpu_lora.cluster.cluster_connection import target

    where = target(values["address"], values["file"], values["local"])
    from wgpu_lora.cli.cluster.run_driver import run_tasks
    from wgpu_lora.cluster.cluster_tasks import shared_arguments
    from wgpu_lora.cluster.sweep import grid_of, sweep_tasks
    from wgpu_lora.cluster.tune_sweep import check_tune

    sweep = SweepOptions(**{name: values[name] for name in SWEEP_FIELDS if is_given(ctx, name)})
    if sweep.scheduler != "none":
        check_tune()
    grid = grid_of(values["param"] or [])
    options = run_options(ctx, values, where.file)
    args = shared_arguments(training, recipe, where.file)
    warn_unused(training.keys() - grid.keys(), args)
    tasks = sweep_tasks(grid, sweep, args, where.file.data_root if where.file else None, options.shared)
    return run_tasks(where, tasks, options, sweep=sweep, detach=values["detach"], dashboard=values["dashboard"])


@partial(training_options, instead=_sweep)
@with_options(RunOptions, SweepOptions)
def sweep(
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
