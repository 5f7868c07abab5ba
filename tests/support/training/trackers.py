"""Trackers for tests: one that writes what it is told, and others that fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.train.track.trackers import TrackedRun, Tracker

SEEN = "seen.jsonl"


class Writing(Tracker):
    """Writes to seen.jsonl in the run's directory."""

    module = extra = "json"

    def __init__(self, run: TrackedRun) -> None:
        self._file, self.url = Path(run.directory) / SEEN, run.directory
        self._write({"begin": vars(run)})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        print("noise on standard output")
        self._write({"step": step, **metrics})

    def finish(self, status: str) -> None:
        self._write({"finish": status})

    def _write(self, facts: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(facts) + "\n")


class RaisingAtStart(Writing):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no route\nto the server")


class Raising(Writing):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ValueError("no such metric")


class Exiting(Writing):
    def finish(self, status: str) -> None:
        raise SystemExit(3)
