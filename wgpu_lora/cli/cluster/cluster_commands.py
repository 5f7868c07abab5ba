"""The commands of wgpu-lora cluster. What they need is imported when they run, since that takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from wgpu_lora.cli.console import line, print_json
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig
from wgpu_lora.cli.parameters import Json, TrainingCommand, given_options, recipe_of, warn_unused
from wgpu_lora.cluster.cluster_file import CLUSTER, SWEEP, RunOptions, SweepOptions
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import program
from wgpu_lora.names.spelling import COMMAND_LINE, naming

if TYPE_CHECKING:
    from wgpu_lora.cluster.cluster_connection import Cluster
    from wgpu_lora.cluster.cluster_file import ClusterFile

Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster that runs already. Default: RAY_ADDRESS, else Ray on this machine.",
        metavar="auto|HOST:PORT|ray://HOST:PORT",
        rich_help_panel=CLUSTER,
    ),
]
ClusterToml = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster file.", metavar="cluster.toml", rich_help_panel=CLUSTER),
]
Here = Annotated[
    bool,
    typer.Option("--local", help="Use Ray of your own with the devices of this machine.", rich_help_panel=CLUSTER),
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return as soon as the run is accepted; see 'attach'.", rich_help_panel=CLUSTER),
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard", help="With --local, start Ray's dashboard on this machine.", rich_help_panel=CLUSTER),
]


class RunCommand(TrainingCommand):
    """A command that trains on a cluster: --help shows its own options and the most common ones of training."""

    most_used: ClassVar[Sequence[str]] = (
        *("local", "file", "address", "adapters", "adapters_config", "recipe", "model", "data", "output"),
        *("name", "shared", "mirror_steps", "join", "data_parallel", "eval_device", "send_data", "detach"),
    )
    kinds: ClassVar[Sequence[type]] = (RunOptions,)


def run_options(ctx: typer.Context, file: ClusterFile | None) -> RunOptions:
    """How a run uses the cluster: as the command line says, else as [run] of the file does. Raises UserError."""
    with naming(COMMAND_LINE):
        return replace(file.run if file else RunOptions(), **given_options(ctx, RunOptions))


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


def run(
    ctx: typer.Context,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    detach: Detach = False,
    dashboard: Dashboard = False,
) -> int:
    """Train adapters on the devices of a cluster, each where it fits and is done soonest.

    All of them are shown in one table. Ctrl-C leaves them running: 'attach' comes back, 'cancel' ends them. Everything
    that can be refused is refused before anything runs.
    """
    from wgpu_lora.cluster.cluster_connection import target

    where = target(address, file, local)
    from wgpu_lora.cli.cluster.run_driver import run_tasks
    from wgpu_lora.cluster.cluster_tasks import gather_tasks, shared_arguments

    training, recipe, options = given_options(ctx), recipe_of(ctx), run_options(ctx, where.file)
    tasks = gather_tasks(training, recipe, adapters or [], adapters_config, where.file, options.shared)
    warn_unused(training, shared_arguments(training, recipe, where.file))
    return run_tasks(where, tasks, options, detach=detach, dashboard=dashboard)


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
        *(item.name for item in fields(SweepOptions)),
        *(name for name in RunCommand.most_used if not name.startswith("adapters")),
    )
    kinds: ClassVar[Sequence[type]] = (*RunCommand.kinds, SweepOptions)


def sweep(
    ctx: typer.Context,
    param: Param = None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
    detach: Detach = False,
    dashboard: Dashboard = False,
) -> int:
    """Train an adapter for every combination of values, and list them, the best first.

    Adapters that differ only in what those of a pipeline may differ in are trained together on a device. The list is
    also in sweep.json in --output, beside the adapters' directories.
    """
    from wgpu_lora.cluster.cluster_connection import target

    where = target(address, file, local)
    from wgpu_lora.cli.cluster.run_driver import run_tasks
    from wgpu_lora.cluster.cluster_tasks import shared_arguments
    from wgpu_lora.cluster.sweep import grid_of, sweep_tasks
    from wgpu_lora.cluster.tune_sweep import check_tune

    sweep = SweepOptions(**given_options(ctx, SweepOptions))
    if sweep.scheduler != "none":
        check_tune()
    training, grid, options = given_options(ctx), grid_of(param or []), run_options(ctx, where.file)
    args = shared_arguments(training, recipe_of(ctx), where.file)
    warn_unused(training.keys() - grid.keys(), args)
    tasks = sweep_tasks(grid, sweep, args, where.file.data_root if where.file else None, options.shared)
    return run_tasks(where, tasks, options, sweep=sweep, detach=detach, dashboard=dashboard)
