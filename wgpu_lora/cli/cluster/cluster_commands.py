"""The commands of wgpu-lora cluster."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import fields, replace
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
    with_run_options,
)
from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.console import table as made_table
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig
from wgpu_lora.cli.parameters import Json, is_given, option_parameter, training_options, warn_unused
from wgpu_lora.cluster.cluster_file import SWEEP, SweepOptions
from wgpu_lora.errors import UserError
from wgpu_lora.installation import program
from wgpu_lora.text import escape_unprintable
from wgpu_lora.train.options.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.cluster.messages import DeviceView, RunView, Snapshot, TaskView


Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run; needed only if several go on.")]


def attach(run: Run = None, address: Address = None, file: ClusterToml = None, local: Here = False) -> int:
    """Show a run that goes on, and fetch what has ended meanwhile."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cli.cluster.running import attach_to
    from wgpu_lora.cluster.cluster_connection import target

    return attach_to(target(address, file, local), run)


LINES = 5  # of events
REASONS = 10  # of adapters
RUNS = 20


def status(address: Address = None, file: ClusterToml = None, local: Here = False, as_json: Json = False) -> int:
    """Show machines, devices, leases of their memory, runs and speeds."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.cluster_connection import connected, target
    from wgpu_lora.cluster.preflight import SURVEY_SECONDS
    from wgpu_lora.cluster.run_status import as_json as plain
    from wgpu_lora.cluster.run_status import snapshot_of

    with connected(target(address, file, local)) as cluster:
        cluster.controller("nodes", seconds=SURVEY_SECONDS)  # as they are now
        seen = snapshot_of(cluster)
    if as_json:
        print_json(plain(seen))
    else:
        show(seen)
    return 0


def show(seen: Snapshot) -> None:
    """Print a table of devices, one of runs, and the newest events."""
    from rich.text import Text

    hosts = {node.address: node.host for node in seen.nodes}
    for node in seen.nodes:
        if not node.devices:
            line("host", f"{node.host} ({node.address}): no WebGPU device")
    if seen.devices:
        columns = ("device", "name", "backend", "state", "jobs", "tokens/s", "free", "of", "speed", "leases")
        rows = [_device(one, hosts.get(one.facts.address, one.facts.address)) for one in seen.devices]
        left = ("device", "name", "backend", "state", "jobs", "leases")
        console().print(made_table(columns, [[Text(escape_unprintable(cell)) for cell in row] for row in rows], left))
    else:
        line("devices", "none")
    for view in seen.devices:
        if view.state == "quarantined":
            place = f"{hosts.get(view.facts.address, view.facts.address)}:{view.facts.index}"
            again = f"'{program()} cluster release {place}' uses it again"
            line("aside", f"jobs failed on {place} {view.failures} times in a row: {again}")
    if seen.runs:
        print()
        of_runs = ("run", "by", "began", "adapters", "tokens/s", "results")
        rows = [_run_row(run, [task for task in seen.tasks if task.run == run.name]) for run in seen.runs[-RUNS:]]
        cells = [[Text(escape_unprintable(cell)) for cell in row] for row in rows]
        console().print(made_table(of_runs, cells, (*of_runs[:4], "results")))
    _explain(seen)
    if seen.events:
        print()
    for event in seen.events[-LINES:]:
        line("event", f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}")


def _explain(seen: Snapshot) -> None:
    """Print what is said of adapters whose run goes on, or whose result has not been fetched."""
    from wgpu_lora.cli.cluster.run_table import reasons

    over = {run.name for run in seen.runs if run.over}
    named = [
        replace(task, name=f"{task.run}/{task.name}") for task in seen.tasks if task.run not in over or not task.fetched
    ]
    result = reasons(named)
    for state, why in result[:REASONS]:
        line(state, why)
    if len(result) > REASONS:
        line("and", f"{len(result) - REASONS:,} more reasons: see '{program()} cluster status --json'")


def _device(view: DeviceView, host: str) -> list[str]:
    from wgpu_lora.train.memory import format_bytes

    facts = view.facts
    return [
        f"{host}:{facts.index}",
        facts.name,
        facts.backend,
        view.state,
        ", ".join(view.units),
        "" if view.tokens_per_second is None else f"{view.tokens_per_second:,.0f}",
        "" if facts.free is None else format_bytes(facts.free),
        "" if facts.budget is None else format_bytes(facts.budget),
        "" if facts.speed is None else f"{facts.speed:,.0f}",
        "; ".join(lease.partition(" (")[0] for lease in facts.leases),  # without what for, which is long
    ]


def _run_row(run: RunView, tasks: Sequence[TaskView]) -> list[str]:
    from wgpu_lora.cli.cluster.run_table import ORDER

    count = {state: sum(task.state == state for task in tasks) for state in ORDER}
    speed = sum(task.progress.tokens_per_second or 0 for task in tasks if task.state == "running")
    here = "fetched" if all(task.fetched for task in tasks) else "to be fetched by 'attach'"
    return [
        run.name,
        run.by,
        time.strftime("%m-%d %H:%M", time.localtime(run.began)),
        ", ".join(f"{number:,} {state}" for state, number in count.items() if number),
        f"{speed:,.0f}" if speed else "",
        run.shared or (here if run.over else ""),
    ]


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as 'cluster status' shows it.")],
    task: Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="Only this adapter of it.")] = None,
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """End a run, or one adapter of it. What was trained until the last checkpoint can still be fetched by 'attach'."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.cluster_connection import connected, target

    with connected(target(address, file, local)) as cluster:
        cluster.controller("cancel", run, task)
    line("cancelled", f"{run}, {task}" if task else run)
    return 0


def release(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Its key, or HOST:INDEX, of 'cluster status'.")],
    address: Address = None,
    file: ClusterToml = None,
    local: Here = False,
) -> int:
    """Use a device again that was put aside because jobs failed on it."""
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cluster.cluster_connection import connected, target
    from wgpu_lora.cluster.run_status import chosen_device, place_of, snapshot_of

    with connected(target(address, file, local)) as cluster:
        seen = snapshot_of(cluster)
        result = chosen_device(seen, device)
        cluster.controller("release", result.facts.id)
    line("released", f"{place_of(seen, result)}, {result.facts.name}")
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
    from wgpu_lora.cluster.cluster_file import read_cluster_file
    from wgpu_lora.cluster.extra import check_ray
    from wgpu_lora.cluster.launcher import up

    check_ray()
    up(read_cluster_file(file), line)


def down(file: ClusterToml = None, local: Here = False) -> None:
    """End Ray and all jobs on the hosts of a cluster file, or on this machine. Checkpoints and results stay."""
    from wgpu_lora.cluster.cluster_file import read_cluster_file
    from wgpu_lora.cluster.extra import check_ray
    from wgpu_lora.cluster.launcher import down
    from wgpu_lora.cluster.local_ray import end_local
    from wgpu_lora.cluster.state_file import unfinished_runs

    if local is (file is not None):
        raise UserError("Give either -f cluster.toml or --local: the cluster to end.")
    if file is None:
        ended = end_local()
        line("ended", "Ray on this machine" if ended else "nothing: Ray does not run on this machine")
        if ended and (left := unfinished_runs()):
            line("unfinished", f"{', '.join(left)}: '{program()} cluster attach --local' goes on")
        return
    check_ray()
    down(read_cluster_file(file), line)


def _run(ctx: typer.Context, given: dict[str, Any], recipe: str | None, values: dict[str, Any]) -> int:
    from wgpu_lora.cluster.extra import check_ray

    check_ray()
    from wgpu_lora.cli.cluster.running import run_tasks
    from wgpu_lora.cluster.cluster_connection import target
    from wgpu_lora.cluster.cluster_tasks import gather_tasks, shared_arguments

    what = target(values["address"], values["file"], values["local"])
    options = run_options(ctx, values, what.file)
    tasks = gather_tasks(given, recipe, values["adapters"] or [], values["adapters_config"], what.file, options.shared)
    warn_unused(given, shared_arguments(given, recipe, what.file))
    return run_tasks(what, tasks, options, detach=values["detach"], dashboard=values["dashboard"])


@with_run_options
def _run_command(
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


_run_command.__name__ = "run"
run = training_options(_run_command, _run)


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
    from wgpu_lora.cluster.cluster_connection import target
    from wgpu_lora.cluster.cluster_tasks import shared_arguments
    from wgpu_lora.cluster.sweep import grid_of, sweep_tasks
    from wgpu_lora.cluster.tune_sweep import check_tune

    sweep = SweepOptions(**{name: values[name] for name in OWN if is_given(ctx, name)})
    if sweep.scheduler != "none":
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
def _sweep_command(
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


_sweep_command.__name__ = "sweep"
_parameters = inspect.signature(_sweep_command).parameters.values()
_sweep_command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_parameters, *map(option_parameter, fields(SweepOptions))]
)
sweep = training_options(_sweep_command, _sweep)
