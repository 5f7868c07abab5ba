"""Held-out losses that another device has measured, beside the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.facts import TaskView
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import to_json

FILE = "evaluations.jsonl"


def write_evaluations(cluster: Asking, run: str, tasks: Sequence[TaskView]) -> None:
    """Write evaluations.jsonl into the output directories that are on this machine: step, eval_loss and time.

    Raises:
        UserError: a directory cannot be written. ClusterGone: the cluster does not answer.
    """
    found = cluster.coordinator("evaluations", run)
    for task in tasks:
        lines = [{k: v for k, v in one.items() if k != "task"} for one in found if one["task"] == task.name]
        if lines and Path(task.output).is_dir():
            try:
                write_bytes_atomic(Path(task.output) / FILE, "".join(to_json(one) + "\n" for one in lines).encode())
            except OSError as error:
                raise UserError(f"{task.output}/{FILE} cannot be written ({reason(error)}): mend that.") from None
