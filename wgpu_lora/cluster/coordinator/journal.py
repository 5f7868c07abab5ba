"""What a coordinator knows, on its machine's disk, so that another one goes on where it was killed."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import Timeout

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.coordinator.state import Requests, State
from wgpu_lora.cluster.facts import RunRequest, from_plain
from wgpu_lora.cluster.node.layout import NAME
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import to_json
from wgpu_lora.locks import lock_file, sweep

VERSION = 1
DIRECTORY = "coordinator"  # in the cluster's directory on its host
STATE, RUNS, LOCK = "state.json", "runs", "lock"
LOCK_SECONDS = 20.0  # how long the process of a coordinator that was killed may take to end


class Journal:
    """A directory with the state, and with a file for the request of each run, which never changes.

    Each file is replaced atomically. A run's request is written before the first state that has the run, and removed
    after the last one.
    """

    def __init__(self, directory: Path, patience: float = LOCK_SECONDS):
        """Take the directory for this process alone; patience: seconds that another one may take to leave it.

        Raises:
            UserError: another process has it, or it cannot be written.
        """
        self.directory = directory
        try:
            (directory / RUNS).mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(directory / LOCK, patience).lock
            sweep(directory, re.compile(re.escape(STATE)))
            sweep(directory / RUNS, re.compile(r".+\.json"))
        except Timeout:
            raise UserError(
                f"{directory} is used by the coordinator of another cluster: set WGPU_LORA_CLUSTER_DIR on this host to "
                f"another directory before Ray is started."
            ) from None
        except OSError as error:
            raise UserError(f"{directory} cannot be written ({reason(error)}): make room there.") from None

    def read(self) -> tuple[State, Requests] | None:
        """What was written last; None if nothing was.

        A run whose request is missing is left out: it was being taken, or its file was damaged.

        Raises:
            UserError: the state is damaged, or was written by a newer version.
        """
        path = self.directory / STATE
        try:
            told = json.loads(path.read_bytes())
            if not isinstance(told, dict) or told.get("version") != VERSION:
                raise ValueError("it is of another version")
            state = from_plain(State, told["state"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise UserError(f"{path} cannot be read ({reason(error)}): restore it, or move it away.") from None
        requests = {name: request for name in state.runs if (request := self._request(name)) is not None}
        for name in set(state.runs) - set(requests):
            _leave_out(state, name)
        return state, requests

    def _request(self, name: str) -> RunRequest | None:
        try:
            return from_plain(RunRequest, json.loads(self._path(name).read_bytes()))
        except (OSError, ValueError, RecursionError):
            return None

    def add(self, request: RunRequest) -> None:
        """Write a run's request. Raises OSError."""
        write_bytes_atomic(self._path(request.name), _json(request))

    def write(self, state: State) -> None:
        """Replace the state. Raises OSError."""
        write_bytes_atomic(self.directory / STATE, _json({"version": VERSION, "state": state}))

    def forget(self, run: str) -> None:
        """Remove a run's request, after a state without the run was written."""
        with suppress(OSError):
            self._path(run).unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Keep a state that cannot be read under another name. Raises UserError."""
        path = self.directory / STATE
        kept = next(p for n in count(1) if not (p := path.with_name(f"unreadable-{n}.json")).exists())
        try:
            return path.rename(kept)
        except OSError as error:
            raise UserError(f"{path} cannot be renamed ({reason(error)}): check its owner.") from None

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.release()

    def _path(self, run: str) -> Path:
        if not NAME.fullmatch(run):
            raise UserError(f"{run!a:.80} cannot be the name of a run: use letters, digits, '.', '_' and '-'.")
        return self.directory / RUNS / f"{run}.json"


def unfinished(directory: Path) -> list[str]:
    """The runs of a journal, which nobody may be writing, that go on or have results that nobody has fetched; none if
    it cannot be read."""
    try:
        state = from_plain(State, json.loads((directory / STATE).read_bytes())["state"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    due = {task.run for task in state.tasks.values() if task.results and not task.fetched}
    return [name for name, run in state.runs.items() if not run.ended or name in due]


def _json(value: Any) -> bytes:
    """JSON of facts. Without copies of them, as `to_plain` makes, since a state may be a megabyte."""
    try:
        return json.dumps(value, default=vars, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a loss that is not finite
        return to_json(json.loads(json.dumps(value, default=vars)), separators=(",", ":")).encode()


def _leave_out(state: State, run: str) -> None:
    del state.runs[run]
    state.tasks = {name: task for name, task in state.tasks.items() if task.run != run}
    state.units = {name: unit for name, unit in state.units.items() if unit.run != run}
    state.caches = {name: cache for name, cache in state.caches.items() if cache.run != run}
