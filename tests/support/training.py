"""Runs of the product's own trainer on the golden fixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from support.models import FIXTURES, golden, save_golden_adapter
from wgpu_lora.train.arguments import TrainingArguments


def model_dir(architecture: str) -> Path:
    return FIXTURES / "models" / architecture


def write_rows(path: Path, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> Path:
    rows = [
        {"input_ids": ids[i, :n].tolist(), "labels": labels[i, :n].tolist()} for i, n in enumerate(lengths.astype(int))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_rows(path: Path, count: int, vocab: int, seed: int = 0, longest: int = 14) -> Path:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, vocab, rng.integers(4, longest + 1)).tolist() for _ in range(count)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def golden_arguments(tmp_path: Path, architecture: str, **changes: Any) -> TrainingArguments:
    """The options of the golden 30-step curve (tests/fixtures/README.md)."""
    values = golden(architecture)
    options: dict[str, Any] = {
        "model": str(model_dir(architecture)),
        "data": str(
            write_rows(tmp_path / "rows.jsonl", values["data_ids"], values["data_labels"], values["data_lengths"])
        ),
        "output": str(tmp_path / "run"),
        "init_adapter": str(save_golden_adapter(architecture, tmp_path / "initial")),
        "learning_rate": 2e-3,
        "warmup_ratio": 0.1,
        "weight_decay": 0.01,
        "max_steps": 30,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": 16,
        "packing": False,
        "shuffle": False,
        "logging_steps": 1,
        "save_steps": 0,
    }
    return TrainingArguments(**(options | changes))
