"""The log of a run, and the environment that its record states."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import parse_object, to_json
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.records import Environment, UsedDevice
from wgpu_lora.train.run.run_state import is_number
from wgpu_lora.train.track.secret_masking import masked

LOG, COMPLETIONS = "log.jsonl", "completions.jsonl"
REQUIRED_KEYS = {"step", "epoch"}  # keys of a line, besides a loss or a held-out loss
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2")


class Log:
    """A log with one JSON object per line, flushed as it is written. Resuming drops lines that will be written again.

    damaged: number of invalid lines, which are dropped too.

    Args:
        entry: reads a line; None if it is damaged.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int | None = None,
        entry: Callable[[bytes], dict[str, Any] | None] | None = None,
    ):
        self.path, self.damaged = path, 0
        if resume_step is not None and path.is_file():
            lines = _lines(path, entry or _entry)
            self.damaged = sum(record is None for _, record in lines[:-1])  # a crash may have cut the last one
            earlier = [line + b"\n" for line, record in lines if record and record["step"] <= resume_step]
            write_bytes_atomic(path, b"".join(earlier))
        elif path.exists():
            path.unlink()

    def write(self, line: dict[str, Any]) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")
        except OSError as error:
            error.filename = str(self.path)
            with suppress(OSError):
                os.truncate(self.path, size)  # no part of a line, so that it can be written again
            raise


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without damaged ones."""
    return [entry for _, entry in _lines(path, _entry) if entry]


def completion_entry(line: bytes) -> dict[str, Any] | None:
    """A line of COMPLETIONS, of the step that it was sampled for; None if it is damaged."""
    try:
        entry = parse_object(line, "the line")
    except UserError:
        return None
    return entry if type(entry.get("step")) is int else None


def _lines(path: Path, entry: Callable[[bytes], dict[str, Any] | None]) -> list[tuple[bytes, dict[str, Any] | None]]:
    return [(line, entry(line)) for line in path.read_bytes().split(b"\n") if line.strip()]


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line of a log, which contains only numbers; None if it is damaged."""
    try:
        entry = parse_object(line, "the line")
    except UserError:
        return None
    kinds = set(entry)
    valid = kinds >= REQUIRED_KEYS and kinds & {"loss", "eval_loss"} and type(entry["step"]) is int
    valid = valid and ("loss" in kinds or entry["step"] == 0) and all(map(is_number, entry.values()))
    return entry if valid else None


def environment(device: Device) -> Environment:
    """Versions, device, driver and command line."""
    info = device.info
    versions = {name: version(name) for name in PACKAGES}
    return Environment(
        {"python": platform.python_version(), **device.webgpu.versions(), **versions},
        platform.platform(),
        UsedDevice(
            info.name,
            info.driver,
            info.backend,
            info.kind,
            device.capabilities.subgroup_size,
            device.options.checked,
            verdicts_of(device).reported,
            device.capabilities.units,
        ),
        masked(sys.argv),
    )


def adapter_digest(directory: str, storage: CheckpointStore = PLAIN_FILES) -> str | None:
    """The digest of an adapter's weights; None if they no longer exist."""
    path = Path(directory) / "adapter_model.safetensors"
    return storage.digest(path) if storage.is_file(path) else None
