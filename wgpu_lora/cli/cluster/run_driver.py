"""The driver of a run on a cluster, from its tasks to its results: what `cluster run` and `cluster sweep` do alike."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from wgpu_lora.cli.cluster.run_table import Table, report
from wgpu_lora.cli.console import line
from wgpu_lora.cluster.cluster_connection import Cluster, ClusterGone, Target, connected
from wgpu_lora.cluster.controller.state_file import unfinished_runs
from wgpu_lora.cluster.launch import local_ray
from wgpu_lora.cluster.messages import RunRequest, Task
from wgpu_lora.cluster.node_versions import difference, own_versions
from wgpu_lora.cluster.preflight import check_here, listed_hosts, missing_hosts, request_of, surveyed
from wgpu_lora.cluster.run_status import Followed, chosen_run, follow, snapshot_of, write_evaluations
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import program
from wgpu_lora.names.text import count_noun, join_words
from wgpu_lora.processes.signals import on_end_signal

if TYPE_CHECKING:
    from wgpu_lora.cluster.cluster_file import RunOptions, SweepOptions

SUBMIT_SECONDS = 120.0


def run_tasks(
    where: Target,
    tasks: Sequence[Task],
    options: RunOptions,
    *,
    sweep: SweepOptions | None = None,
    detach: bool = False,
    dashboard: bool = False,
) -> int:
    """Check and submit a run, show it, and fetch its results; returns the exit code.

    Args:
        detach: return once it is submitted. dashboard: of Ray, if it is started here.

    Raises:
        UserError: the run is refused, or the cluster cannot be reached.
    """
    if dashboard and not where.local:
        raise UserError("--dashboard is for --local: the dashboard of a cluster is its own.")
    if where.local:
        check_here(tasks)
    with _session(where, where.local, dashboard) as cluster:
        request = _request(cluster, where, tasks, options, sweep)
        if sweep and sweep.scheduler != "none":
            return _tune(cluster, request, detach)
        run = _submit(cluster, request, where)
        line("run", f"{run}: {count_noun(len(tasks), 'adapter')}")
        if detach:
            _print_commands(where, run)
            return 0
        return _follow_run(cluster, where, run, fetches=options.shared is None)


def attach_to(where: Target, name: str | None) -> int:
    """Come back to a run; returns the exit code.

    Ray is started on this machine if it was ended here before a run was over.

    Args:
        name: None for the only one that goes on.

    Raises:
        UserError: there is no such run, or the cluster cannot be reached.
    """
    with _session(where, where.local and bool(unfinished_runs())) as cluster:
        run = chosen_run(cluster, name)
        return _follow_run(cluster, where, run.name, fetches=run.shared is None)


@contextmanager
def _session(where: Target, starts: bool, dashboard: bool = False) -> Iterator[Cluster]:
    """A connection to a cluster. Ray on this machine is started first, if asked for, and ended if nothing goes on."""
    if not where.local:
        with connected(where) as cluster:
            yield cluster
        return
    with local_ray.using():
        fresh = starts and local_ray.start_ray(_devices_here, dashboard=dashboard)[1]
        try:
            with connected(where) as cluster:
                fresh = False
                try:
                    yield cluster
                finally:
                    local_ray.end_unused(lambda: _all_done(cluster))
        finally:
            if fresh:  # and cannot be joined
                local_ray.end_unused(lambda: True)


def _devices_here() -> dict[str, float]:
    """The resources that Ray is started with."""
    from wgpu_lora.cluster.device_resources import advertised, node_devices

    line("ray", "starting on this machine")
    if runs := unfinished_runs():
        line("goes on", f"{join_words(runs, limit=3)}, of a Ray that was ended here: see 'attach'")
    return advertised(node_devices(""))


def _all_done(cluster: Cluster) -> bool:
    """Whether no run of the cluster goes on, or has results that nobody has fetched."""
    try:
        snapshot = snapshot_of(cluster)
    except UserError:
        return False
    return all(run.over for run in snapshot.runs) and all(task.fetched for task in snapshot.tasks)


def _request(
    cluster: Cluster, where: Target, tasks: Sequence[Task], options: RunOptions, sweep: SweepOptions | None
) -> RunRequest:
    """The request for the controller, checked on the cluster. Raises UserError if it is refused."""
    nodes = surveyed(cluster, own_versions(), where.local)
    for node in nodes:
        if not node.devices and (reason := difference(own_versions(), node.versions)):
            line("left out", f"{node.host}, since {reason}")
    devices = sum(len(node.devices) for node in nodes)
    line("cluster", f"{count_noun(devices, 'device')} of {count_noun(len(nodes), 'host')}: {listed_hosts(nodes)}")
    if where.file and (missing := missing_hosts(nodes, where.file)):
        advice = f"'{program()} cluster up{where.words()}' starts it again"
        line("missing", f"{join_words(missing, limit=3)}: the run goes on without; {advice}")
    return request_of(cluster, nodes, tasks, options, sweep)


def _tune(cluster: Cluster, request: RunRequest, detach: bool) -> int:
    """A sweep by Ray Tune, in the foreground; the exit code. The same command goes on with one that was interrupted."""
    from wgpu_lora.cluster.tune_sweep import run_tune, tune_storage

    if detach or request.shared or request.eval_device or request.data_parallel > 1 or request.jobs_per_device > 1:
        raise UserError(
            "--detach, --shared, --eval-device, --data-parallel and --jobs-per-device are for sweeps without a "
            "scheduler: leave them out."
        )
    line("sweep", f"{request.name}: {count_noun(len(request.tasks), 'trial')} of Ray Tune")
    followed = Followed(run_tune(request, tune_storage(request, snapshot_of(cluster).nodes)))
    report(followed)
    return followed.code


def _submit(cluster: Cluster, request: RunRequest, where: Target) -> str:
    """The name of the accepted run. An interruption meanwhile acts afterwards, when it is known whether it was.

    Raises:
        UserError: the run is refused.
    """
    signals: list[int] = []
    with on_end_signal(signals.append):
        run = str(cluster.controller("submit", asdict(request), seconds=SUBMIT_SECONDS))
    if signals:
        line("detached", f"{run} is accepted, and goes on")
        _print_commands(where, run)
        signal.raise_signal(signals[0])
    return run


def _follow_run(cluster: Cluster, where: Target, run: str, *, fetches: bool) -> int:
    """Show a run until it is over, and fetch its results; returns the exit code.

    Raises:
        ClusterGone: the cluster does not answer any more.
        KeyboardInterrupt: the person has detached.
    """
    try:
        with Table(run) as table:
            followed = follow(cluster, run, table, fetches=fetches)
    except (ClusterGone, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            line("detached", "the run goes on")
        _print_commands(where, run)
        raise
    write_evaluations(cluster, run, followed.tasks)
    report(followed)
    return followed.code


def _print_commands(where: Target, run: str) -> None:
    """The commands that come back to a run, and end it."""
    line("attach", f"{program()} cluster attach {run}{where.words()}", whole=True)
    line("cancel", f"{program()} cluster cancel {run}{where.words()}", whole=True)
