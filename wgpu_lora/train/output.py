"""What a run leaves behind beside its adapter: log.jsonl and run.json (the model card: train/card.py)."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgpu_lora.formats.atomic import file_digest, write_bytes_atomic
from wgpu_lora.gpu.adapters import native_version
from wgpu_lora.gpu.device import Device

LOG, RUN = "log.jsonl", "run.json"
PACKAGES = ("wgpu-lora", "wgpu", "numpy", "safetensors", "tokenizers", "jinja2")


class Log:
    """One JSON object a line, flushed as it is written. Resuming drops the lines that will be written again."""

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = path
        if resume_step and path.is_file():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= resume_step]
            write_bytes_atomic(path, "".join(f"{line}\n" for line in kept).encode())
        elif path.exists():
            path.unlink()

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a crash is dropped


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def environment(device: Device) -> dict[str, Any]:
    """Versions, device and driver: what else a run depends on."""
    info = device.info
    versions = {name: version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), "wgpu-native": native_version(), **versions},
        "platform": platform.platform(),
        "device": {
            "name": info.name,
            "driver": info.driver,
            "backend": info.backend,
            "kind": info.kind,
            "subgroup_size": device.subgroup_size,
            "checked_shaders": device.options.checked,
        },
        "command": sys.argv,
    }


def adapter_digest(directory: str) -> str | None:
    """The digest of an adapter's weights, None where they are gone by now."""
    path = Path(directory) / "adapter_model.safetensors"
    return file_digest(path) if path.is_file() else None


def write_run(directory: Path, facts: dict[str, Any]) -> None:
    write_bytes_atomic(directory / RUN, (json.dumps(facts, indent=1) + "\n").encode())
