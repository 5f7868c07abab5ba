"""A run as it goes on: snapshots, results brought to this machine, and which run or device a person means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wgpu_lora.cluster.cluster_connection import Cluster, ClusterGone
from wgpu_lora.cluster.controller.run_state import ENDED
from wgpu_lora.cluster.messages import DeviceFacts, RunView, Snapshot, StoredFile, TaskView, from_plain
from wgpu_lora.cluster.task_outputs import fetch
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.names.text import count_noun, join_words
from wgpu_lora.train.run.run_checkpoint import BEST
from wgpu_lora.train.run.run_tracking import logged_id
from wgpu_lora.train.track.run_log import RunLog, run_log_enabled

POLL = 1.0  # seconds between snapshots
PATIENCE = 90.0  # seconds without an answer after which the cluster counts as gone: a controller may restart meanwhile
SNAPSHOT_SECONDS = 15.0
GOOD = ("finished", "stopped")
MOST = 5  # names that a sentence lists


class Watcher(Protocol):
    """Shows a run."""

    def update(self, snapshot: Snapshot) -> None: ...

    def away(self, seconds: float) -> None: ...

    def fetching(self, task: str) -> None: ...

    def not_fetched(self, task: str, why: str) -> None: ...


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
    watcher: Watcher,
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
    last_answer, results = clock(), dict[str, str | None]()  # why a result could not be written here, by task
    while True:
        poll_start = clock()
        try:
            snapshot = snapshot_of(cluster, run)
            watcher.update(snapshot)
            ended_tasks = (
                [task for task in snapshot.tasks if task.state in ENDED and not task.fetched] if fetches else []
            )
            outputs = {task.name: task.output for task in ended_tasks if task.name not in results}
            if outputs:
                new = fetch_results(cluster, run, outputs, watcher.fetching)
                results |= new
                for task, why in new.items():
                    if why:
                        watcher.not_fetched(task, why)
            last_answer = clock()
            if outputs.keys() <= results.keys() and any(view.name == run and view.over for view in snapshot.runs):
                return Followed(snapshot, {task: why for task, why in results.items() if why})
        except ClusterGone as error:
            away = clock() - last_answer
            if away > PATIENCE:
                raise ClusterGone(
                    f"The cluster has not answered for {away:.0f} s, its jobs may go on ({error.problem.rstrip('.')}): "
                    "attach again later."
                ) from None
            watcher.away(away)
        sleep(max(0.0, POLL - (clock() - poll_start)))


def chosen_run(cluster: Cluster, name: str | None) -> RunView:
    """The run of this name; without one, the only one that goes on or has results that were not fetched.

    Raises:
        UserError: there is none, or there are several.
    """
    snapshot = snapshot_of(cluster)
    runs = {run.name: run for run in snapshot.runs}
    if name is not None:
        if name in runs:
            return runs[name]
        names = join_words([*runs][::-1], limit=MOST) if runs else "none"
        raise UserError(f"The cluster knows no run '{name}': its runs are {names}.")
    run_names = {task.run for task in snapshot.tasks if not task.fetched}
    active = [run for run in snapshot.runs if not run.over or run.name in run_names]
    if len(active) == 1:
        return active[0]
    if not active:
        raise UserError("No run goes on in this cluster: 'wgpu-lora cluster status' shows those that have ended.")
    names = join_words([run.name for run in reversed(active)], limit=MOST)
    raise UserError(f"Several runs go on in this cluster: name one of {names}.")


def chosen_device(devices: Sequence[tuple[str, DeviceFacts]], text: str, option: str = "") -> DeviceFacts:
    """The device with this HOST:INDEX, key or id, else the one with this in its name.

    Args:
        devices: with their HOST:INDEX. option: that has the text, for messages.

    Raises:
        UserError: there is none, or several.
    """
    exact = [facts for label, facts in devices if text in (label, facts.id, facts.key)]
    matches = exact or [facts for _, facts in devices if text.casefold() in facts.name.casefold()]
    if len(matches) == 1:
        return matches[0]
    count = count_noun(len(matches), "device") if matches else "no device"
    names = join_words([f"{label} ({facts.name})" for label, facts in devices], limit=MOST) if devices else "none"
    raise UserError(
        f"{f'{option} {text}'.strip()} names {count} of the cluster: give HOST:INDEX, a key, or more of the name; "
        f"there are {names}."
    )


def device_labels(snapshot: Snapshot) -> dict[str, str]:
    """Short names of devices, HOST:INDEX, by their ids."""
    hosts = {node.address: node.host for node in snapshot.nodes}
    return {d.facts.id: f"{hosts.get(d.facts.address, d.facts.address)}:{d.facts.index}" for d in snapshot.devices}


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot for programs; each device also has its `id` and `place`."""
    result, labels = asdict(snapshot), device_labels(snapshot)
    for value, view in zip(result["devices"], snapshot.devices, strict=True):
        value |= {"id": view.facts.id, "place": labels[view.facts.id]}
    return result


# -- results: a directory has its name only when all of it is there and right ------------------------------------------

EVALUATIONS = "evaluations.jsonl"


def fetch_results(
    cluster: Cluster, run: str, outputs: Mapping[str, str], fetching: Callable[[str], None]
) -> dict[str, str | None]:
    """Fetch tasks of a run that have ended; the controller is told which.

    Args:
        outputs: directories of this machine, by task. fetching: called with the task before it is fetched.

    Returns:
        None for each task whose result is here now, or why it could not be written. Others are not there yet, or
        another program is fetching them.

    Raises:
        ClusterGone: the cluster does not answer.
    """
    fetched: dict[str, str | None] = {}
    for result in cluster.controller("results", run):
        task = result["task"]
        if task not in outputs:
            continue
        fetching(task)
        output, files = Path(outputs[task]), [from_plain(StoredFile, file) for file in result["files"]]
        stores = [cluster.store(node, result["storage"]) for node in result["nodes"]]
        try:
            if fetch(stores, result["unit"], task, files, output):
                cluster.controller("fetched", run, task)
                _log_outputs(output)
                fetched[task] = None
        except ClusterGone:
            raise
        except UserError as error:
            fetched[task] = str(error)
    return fetched


def _log_outputs(output: Path) -> None:
    """Log where a result is now, if the run log here has its run: it was trained in a directory of the cluster, which
    is gone. A log that cannot be read or written is left as it is."""
    name = logged_id(output)
    if name is None or not run_log_enabled(True):
        return
    log = RunLog()
    outputs = [str(path.resolve()) for path in (output, output / BEST) if path.is_dir()]
    with suppress(UserError, OSError, NotImplementedError):
        if any(entry.id == name for entry in log.read().entries):
            log.append({"id": name, "outputs": outputs})


def write_evaluations(cluster: Cluster, run: str, tasks: Sequence[TaskView]) -> None:
    """Write evaluations.jsonl into the output directories that are on this machine: step, eval_loss and time.

    Raises:
        UserError: a directory cannot be written. ClusterGone: the cluster does not answer.
    """
    lines = cluster.controller("evaluations", run)
    for task in tasks:
        rows = [{k: v for k, v in line.items() if k != "task"} for line in lines if line["task"] == task.name]
        if rows and Path(task.output).is_dir():
            path = Path(task.output) / EVALUATIONS
            try:
                write_bytes_atomic(path, "".join(to_json(line) + "\n" for line in rows).encode())
            except OSError as error:
                raise UserError(f"{path} cannot be written ({reason(error)}): mend that.") from None
