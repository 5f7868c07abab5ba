"""A run as it goes on: snapshots, results as they end, and which run or device a person means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from wgpu_lora.cluster.cluster_connection import Cluster, ClusterGone
from wgpu_lora.cluster.messages import DeviceView, RunView, Snapshot, TaskView, from_plain, to_plain
from wgpu_lora.cluster.run_results import fetch_results
from wgpu_lora.errors import UserError
from wgpu_lora.text import join_words

POLL = 1.0  # seconds between snapshots
PATIENCE = 90.0  # seconds without an answer after which the cluster counts as gone: a controller may restart meanwhile
SNAPSHOT_SECONDS = 15.0
ENDED = ("finished", "stopped", "failed", "cancelled")
GOOD = ("finished", "stopped")


class Watching(Protocol):
    """What shows a run."""

    def shown(self, snapshot: Snapshot) -> None: ...

    def away(self, seconds: float) -> None: ...

    def fetching(self, task: str) -> None: ...

    def kept(self, task: str, why: str) -> None: ...


@dataclass
class Followed:
    """How following ended. wrong: why results could not be written here, by task."""

    snapshot: Snapshot
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> list[TaskView]:
        return self.snapshot.tasks

    @property
    def code(self) -> int:
        """0 if all tasks finished and their results are where they belong, else 1."""
        return 0 if not self.wrong and all(task.state in GOOD for task in self.tasks) else 1


def snapshot_of(cluster: Cluster, run: str | None = None) -> Snapshot:
    """What the controller knows. Raises ClusterGone; UserError if there is no such run."""
    return from_plain(Snapshot, cluster.controller("snapshot", run, seconds=SNAPSHOT_SECONDS))


def follow(
    cluster: Cluster,
    run: str,
    watching: Watching,
    *,
    fetches: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Followed:
    """Show a run until all of its tasks have ended, and fetch their results as they end.

    Args:
        fetches: whether outputs are directories of this machine; those of a shared folder are written there.

    Raises:
        ClusterGone: the controller has not answered for PATIENCE seconds, or never will.
        UserError: there is no such run.
    """
    heard, fetched, wrong = clock(), set[str](), dict[str, str]()
    while True:
        begun = clock()
        try:
            seen = snapshot_of(cluster, run)
            watching.shown(seen)
            due = ended_unfetched(seen) - fetched - wrong.keys() if fetches else set()
            if due:
                found = fetch_results(cluster, run, outputs_of(seen, due), watching.fetching)
                fetched |= found.done
                wrong |= found.failed
                for task, why in found.failed.items():
                    watching.kept(task, why)
                due -= fetched | wrong.keys()
            heard = clock()
            if not due and any(one.name == run and one.over for one in seen.runs):
                return Followed(seen, wrong)
        except ClusterGone as error:
            away = clock() - heard
            if away > PATIENCE:
                raise ClusterGone(_gone(error, away)) from None
            watching.away(away)
        sleep(max(0.0, POLL - (clock() - begun)))


def ended_unfetched(snapshot: Snapshot) -> set[str]:
    """Tasks whose results are there, and nobody has fetched."""
    return {task.name for task in snapshot.tasks if task.state in ENDED and not task.fetched}


def outputs_of(snapshot: Snapshot, tasks: set[str]) -> Mapping[str, str]:
    """Where results belong, by task."""
    return {task.name: task.output for task in snapshot.tasks if task.name in tasks}


def _gone(error: UserError, seconds: float) -> str:
    why = error.problem.rstrip(".")
    return f"The cluster has not answered for {seconds:.0f} s, its jobs may go on ({why}): attach again later."


MOST = 5  # names that a sentence lists


def chosen_run(cluster: Cluster, name: str | None) -> RunView:
    """The run of this name; without one, the only one that goes on or has results that were not fetched.

    Raises:
        UserError: there is none, or there are several.
    """
    seen = snapshot_of(cluster)
    known = {run.name: run for run in seen.runs}
    if name is not None:
        if name in known:
            return known[name]
        said = join_words([*known][-MOST:], max(0, len(known) - MOST)) if known else "none"
        raise UserError(f"The cluster knows no run '{name}': its runs are {said}.")
    due = {task.run for task in seen.tasks if not task.fetched}
    found = [run for run in seen.runs if not run.over or run.name in due]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError("No run goes on in this cluster: 'wgpu-lora cluster status' shows those that have ended.")
    names = join_words([run.name for run in found[-MOST:]], max(0, len(found) - MOST))
    raise UserError(f"Several runs go on in this cluster: name one of {names}.")


def chosen_device(snapshot: Snapshot, given: str) -> DeviceView:
    """The device with this key or id, or at HOST:INDEX. Raises UserError if there is none, or several."""
    found = [one for one in snapshot.devices if given in (one.facts.id, one.facts.key, place_of(snapshot, one))]
    if len(found) == 1:
        return found[0]
    names = [place_of(snapshot, one) for one in snapshot.devices]
    known = join_words(names[:MOST], max(0, len(names) - MOST)) if names else "none"
    what = "several devices" if found else "no device"
    raise UserError(f"{given} names {what} of the cluster: give HOST:INDEX; there are {known}.")


def place_of(snapshot: Snapshot, view: DeviceView) -> str:
    """A device's short name, HOST:INDEX."""
    hosts = {node.address: node.host for node in snapshot.nodes}
    return f"{hosts.get(view.facts.address, view.facts.address)}:{view.facts.index}"


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot for programs; each device also has its `id` and `place`."""
    found = to_plain(snapshot)
    for value, view in zip(found["devices"], snapshot.devices, strict=True):
        value |= {"id": view.facts.id, "place": place_of(snapshot, view)}
    return found
