"""A run on a cluster, from its tasks to its results: what `cluster run` and `cluster sweep` do alike."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wgpu_lora.cli.cluster.run_table import Table, report
from wgpu_lora.cli.console import line
from wgpu_lora.cluster import local_ray as local
from wgpu_lora.cluster.cluster_connection import Cluster, ClusterGone, Target, connected
from wgpu_lora.cluster.local_ray import end_unused, using
from wgpu_lora.cluster.messages import NodeFacts, RunRequest, Task, from_plain, to_plain
from wgpu_lora.cluster.preflight import SURVEY_SECONDS, check_here, listed_hosts, missing_hosts, request_of, surveyed
from wgpu_lora.cluster.run_results import write_evaluations
from wgpu_lora.cluster.run_status import Followed, chosen_run, follow, snapshot_of
from wgpu_lora.cluster.state_file import unfinished_runs
from wgpu_lora.errors import UserError
from wgpu_lora.installation import program
from wgpu_lora.signals import on_end_signal
from wgpu_lora.text import count_noun, join_words

if TYPE_CHECKING:
    from wgpu_lora.cluster.cluster_file import RunOptions, SweepOptions
    from wgpu_lora.cluster.local_ray import Local

SUBMIT_SECONDS = 120.0
MOST = 3  # runs that a line names


def run_tasks(
    what: Target,
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
    if dashboard and not what.here:
        raise UserError("--dashboard is for --local: the dashboard of a cluster is its own.")
    if what.here:
        check_here(tasks)
    with _here(what, dashboard) as ray, connected(what) as cluster:
        if sweep and sweep.scheduler != "none":
            return _tune(cluster, _request(cluster, what, tasks, options, sweep), detach)
        try:
            run = submit(cluster, _request(cluster, what, tasks, options, sweep), what, ray)
        except BaseException:
            if ray.running and not ray.accepted:
                end_unused(lambda: not ray.shared or _all_done(cluster))
            raise
        line("run", f"{run}: {count_noun(len(tasks), 'adapter')}")
        if detach:
            say_how(what, run)
            return 0
        return follow_run(cluster, what, run, fetches=options.shared is None)


def _tune(cluster: Cluster, request: RunRequest, detach: bool) -> int:
    """A sweep by Ray Tune, in the foreground; the exit code. The same command goes on with one that was interrupted."""
    from wgpu_lora.cluster.tune_sweep import run_tune, tune_storage

    if detach or request.shared or request.eval_device or request.data_parallel > 1 or request.jobs_per_device > 1:
        raise UserError(
            "--detach, --shared, --eval-device, --data-parallel and --jobs-per-device are for sweeps without a "
            "scheduler: leave them out."
        )
    nodes = [from_plain(NodeFacts, node) for node in cluster.controller("nodes", seconds=SURVEY_SECONDS)]
    line("sweep", f"{request.name}: {count_noun(len(request.tasks), 'trial')} of Ray Tune")
    followed = Followed(run_tune(request, tune_storage(request, nodes)))
    report(followed)
    return followed.code


def attach_to(what: Target, name: str | None) -> int:
    """Come back to a run; returns the exit code.

    Ray is started on this machine if it was ended here before a run was over.

    Args:
        name: None for the only one that goes on.

    Raises:
        UserError: there is no such run, or the cluster cannot be reached.
    """
    starts = what.here and (local.running_ray() is not None or unfinished_runs())
    with _here(what) if starts else nullcontext(HereRay()) as ray, connected(what) as cluster:
        run = chosen_run(cluster, name)
        ray.accepted = True
        return follow_run(cluster, what, run.name, fetches=run.shared is None)


def _request(
    cluster: Cluster, what: Target, tasks: Sequence[Task], options: RunOptions, sweep: SweepOptions | None
) -> RunRequest:
    """What to ask the controller for, which has been checked on the cluster. Raises UserError if it is refused."""
    from wgpu_lora.cluster.node_versions import difference, own_versions

    nodes = surveyed(cluster, own_versions(), what.here)
    for node in nodes:
        if not node.devices and (what_differs := difference(own_versions(), node.versions)):
            line("left out", f"{node.host}, since {what_differs}")
    devices = sum(len(node.devices) for node in nodes)
    line("cluster", f"{count_noun(devices, 'device')} of {count_noun(len(nodes), 'host')}: {listed_hosts(nodes)}")
    if what.file and (gone := missing_hosts(nodes, what.file)):
        names = join_words(gone[:MOST], max(0, len(gone) - MOST))
        line("missing", f"{names}: the run goes on without; '{program()} cluster up{what.words()}' starts it again")
    return request_of(cluster, nodes, tasks, options, sweep)


def submit(cluster: Cluster, request: RunRequest, what: Target, ray: HereRay) -> str:
    """The name of the accepted run; from then on, Ray of this machine is left to it.

    An interruption meanwhile is obeyed afterwards, when it is known what happened and said how to come back.

    Raises:
        UserError: the run is refused.
    """
    signals: list[int] = []
    with on_end_signal(signals.append):
        run = str(cluster.controller("submit", to_plain(request), seconds=SUBMIT_SECONDS))
        ray.accepted = True
    if signals:
        line("detached", f"{run} is accepted, and goes on")
        say_how(what, run)
        signal.raise_signal(signals[0])
    return run


def follow_run(cluster: Cluster, what: Target, run: str, *, fetches: bool) -> int:
    """Show a run until it is over, and fetch its results; returns the exit code.

    Raises:
        ClusterGone: the cluster does not answer any more.
        KeyboardInterrupt: the person has detached.
    """
    try:
        with Table(run) as table:
            followed = follow(cluster, run, table, fetches=fetches)
    except ClusterGone:
        say_how(what, run)
        raise
    except KeyboardInterrupt:
        line("detached", "the run goes on")
        say_how(what, run)
        raise
    try:
        write_evaluations(cluster, run, followed.tasks)
        report(followed)
    finally:  # also if a file cannot be written
        if what.here:
            end_unused(lambda: _all_done(cluster))
    return followed.code


def say_how(what: Target, run: str) -> None:
    """The commands that come back to a run, and end it."""
    line("attach", f"{program()} cluster attach {run}{what.words()}", whole=True)
    line("cancel", f"{program()} cluster cancel {run}{what.words()}", whole=True)


@dataclass
class HereRay:
    """Ray on this machine, if a run is for that. accepted: it has the run."""

    running: Local | None = None
    accepted: bool = False

    @property
    def shared(self) -> bool:
        """Whether other programs have used it, too."""
        return self.running is not None and self.running.shared


@contextmanager
def _here(what: Target, dashboard: bool = False) -> Iterator[HereRay]:
    """For `--local`, Ray on this machine; one that was started for a run that is not accepted is ended again."""
    if not what.here:
        yield HereRay()
        return
    with using():
        ray = HereRay(local.start_ray(_devices_here, dashboard=dashboard)[0])
        try:
            yield ray
        finally:
            if not ray.accepted:
                end_unused(lambda: not ray.shared)


def _devices_here() -> dict[str, float]:
    """The resources that Ray is started with."""
    from wgpu_lora.cluster.device_resources import advertised, node_devices

    line("ray", "starting on this machine")
    if left := unfinished_runs():
        line(
            "goes on",
            f"{join_words(left[:MOST], max(0, len(left) - MOST))}, of a Ray that was ended here: see 'attach'",
        )
    return advertised(node_devices(""))


def _all_done(cluster: Cluster) -> bool:
    """Whether no run of the cluster goes on, or has results that nobody has fetched."""
    try:
        seen = snapshot_of(cluster)
    except UserError:
        return False
    return all(run.over for run in seen.runs) and all(task.fetched for task in seen.tasks)
