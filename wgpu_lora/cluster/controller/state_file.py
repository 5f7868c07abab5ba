"""The file of a cluster's state on its head, from which another controller goes on."""

from __future__ import annotations

import json
from pathlib import Path

from wgpu_lora.cluster.cluster_paths import cluster_root
from wgpu_lora.cluster.controller.run_state import ClusterState
from wgpu_lora.cluster.messages import from_plain
from wgpu_lora.files.json_files import to_json

VERSION = 2
DIRECTORY, STATE = "controller", "state.json"  # in the cluster's directory


def state_file() -> Path:
    return cluster_root() / DIRECTORY / STATE


def state_bytes(state: ClusterState) -> bytes:
    """The content of the file of a state, without a copy as `asdict` makes, since a state may be a megabyte."""
    value = {"version": VERSION, "state": state}
    try:
        return json.dumps(value, default=vars, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a loss that is not finite
        return to_json(json.loads(json.dumps(value, default=vars)), separators=(",", ":")).encode()


def read_state_file(path: Path) -> ClusterState:
    """A state from its file. Raises OSError, ValueError or KeyError."""
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError("it is of another version")
    return from_plain(ClusterState, data["state"])


def unfinished_runs() -> list[str]:
    """The runs of this host's state file, which nobody may be writing, that go on or have results that nobody has
    fetched; none if it cannot be read."""
    try:
        state = read_state_file(state_file())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    run_names = {task.run for task in state.tasks.values() if task.results and not task.fetched}
    return [name for name, run in state.runs.items() if not run.ended or name in run_names]
