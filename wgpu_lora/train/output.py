"""What a run leaves behind beside its adapter: log.jsonl, run.json and a model card."""

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

LOG, RUN, CARD = "log.jsonl", "run.json", "README.md"
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


def write_card(directory: Path, facts: dict[str, Any]) -> None:
    """A model card: YAML header that the hub reads, then what was trained, on what, and how it went."""
    options, state, data = facts["options"], facts["state"], facts["data"]
    base = options["model"] or "demo"

    def number(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.4f}"

    text = f"""---
base_model: {base}
library_name: peft
tags:
- lora
- wgpu-lora
---

# LoRA adapter for {base}

Trained with wgpu-lora {facts["environment"]["versions"]["wgpu-lora"]} on {facts["environment"]["device"]["name"]}
({facts["environment"]["device"]["driver"]}).

| | |
|---|---|
| data | {Path(data["path"]).name}: {data["summary"]} |
| data SHA-256 | {data["digest"]} |
| base digest | {facts["base_digest"]} |
| base weights | {options["base_dtype"]} |
| rank, alpha, dropout | {options["lora_r"]}, {options["lora_alpha"]}, {options["lora_dropout"]} |
| targets | {options["target_modules"]} |
| trained parameters | {facts["trainable_parameters"]:,} |
| learning rate | {options["learning_rate"]} {options["lr_scheduler_type"]} |
| steps | {state["step"]} of {state["total_steps"]} ({facts["stop_reason"]}) |
| trained tokens | {state["tokens"]:,} |
| final loss | {number(state["last_loss"])} |
| held-out loss | {number(state["last_eval_loss"])}, best {number(state["best_eval_loss"])} |
"""
    write_bytes_atomic(directory / CARD, text.encode())
