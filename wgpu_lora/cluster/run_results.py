"""Results brought to this machine: a directory has its name only when all of it is there and right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from wgpu_lora.cluster.cluster_connection import Cluster, ClusterGone
from wgpu_lora.cluster.messages import StoredFile, TaskView, from_plain
from wgpu_lora.cluster.task_outputs import fetch
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.train.run.run_checkpoint import BEST
from wgpu_lora.train.run.run_tracking import logged_id
from wgpu_lora.train.track.run_log import RunLog, run_log_enabled

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
