"""A run as it goes on: snapshots of the coordinator, results as they end, until all have or the person detaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.client.bridge import ClusterGone, ConnectionLost
from wgpu_lora.cluster.client.fetch import fetch_ended
from wgpu_lora.cluster.facts import Snapshot, TaskView, from_plain
from wgpu_lora.errors import UserError

POLL = 1.0  # seconds between snapshots
PATIENCE = 90.0  # seconds without an answer after which the cluster counts as gone: a coordinator may restart meanwhile
SNAPSHOT_SECONDS = 15.0
ENDED = ("finished", "stopped", "failed", "cancelled")
GOOD = ("finished", "stopped")


class Watching(Protocol):
    """What shows a run."""

    def shown(self, snapshot: Snapshot) -> None: ...

    def away(self, seconds: float) -> None: ...

    def fetching(self, task: str, done: int, total: int) -> None: ...

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


def snapshot_of(cluster: Asking, run: str | None = None) -> Snapshot:
    """What the coordinator knows. Raises ClusterGone; UserError if there is no such run."""
    return from_plain(Snapshot, cluster.coordinator("snapshot", run, seconds=SNAPSHOT_SECONDS))


def follow(
    cluster: Asking,
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
        ClusterGone: the coordinator has not answered for PATIENCE seconds, or never will.
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
                found = fetch_ended(cluster, run, outputs_of(seen, due), watching.fetching)
                fetched |= found.done
                wrong |= found.wrong
                for task, why in found.wrong.items():
                    watching.kept(task, why)
                due -= fetched | wrong.keys()
            heard = clock()
            if not due and any(one.name == run and one.over for one in seen.runs):
                return Followed(seen, wrong)
        except ClusterGone as error:
            away = clock() - heard
            if away > PATIENCE or isinstance(error, ConnectionLost):
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
