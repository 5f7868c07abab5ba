"""Runs of the product's own trainer on the golden fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import short_of
from support.models import FIXTURES, golden, save_golden_adapter
from wgpu_lora.formats.peft_adapter import PARTS
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.job import Job
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.session.session import Session


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


def golden_job(device: Device, tmp_path: Path, architecture: str, base: str, **changes: object) -> Job:
    args = golden_arguments(tmp_path, architecture, base_dtype=base, **changes)
    return prepare_job(args, open_model(args.model, device, base))


def assert_gradient_is_slope(session: Session, loss: Callable[[], float], length: float = 0.02) -> None:
    """The gradient that is on the device is the slope of the loss in its direction, by central differences."""
    gradients = session.adapters.read(session.device, 0, session.adapters.grads)
    matrices = session.adapters.read(session.device, 0)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for pair in gradients.values() for g in pair))

    def moved(by: float) -> float:
        ahead = {
            key: tuple((m + by / norm * g).astype(np.float32) for m, g in zip(pair, gradients[key], strict=True))
            for key, pair in matrices.items()
        }
        session.adapters.write(session.device, 0, ahead)
        return loss()

    assert (moved(length) - moved(-length)) / (2 * length) == pytest.approx(norm, rel=5e-3)


def gradients_of(
    job: Job, device: Device, architecture: str, allocated: Callable[[Session], None] = lambda session: None
) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients of all parameters) of the golden batch. allocated: called once the session is."""
    values, session = golden(architecture), job.session
    session.allocate()
    allocated(session)
    job.run.place_initial(session)
    rows = [(values["input_ids"][i, :n], values["labels"][i, :n]) for i, n in enumerate(values["lengths"])]
    tokens = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    session.begin()
    session.accumulate([Group((Segment(ids, labels),), weight=1 / tokens) for ids, labels in rows])
    total = session.totals.read_loss(device, 0)
    pairs = session.adapters.read(device, 0, session.adapters.grads)
    gradients = {
        f"{short_of(key)}.{part}": g.copy()
        for key, parts in pairs.items()
        for part, g in zip(PARTS[: len(parts)], parts, strict=True)
    }
    session.close()
    return float(total / tokens), gradients
