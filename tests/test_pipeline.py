"""Several adapters in one run are what each would be by itself, whatever the schedule and whoever fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from training_helpers import model_dir, random_rows

from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.pipeline import SCHEDULES, MultiAdapterPipeline
from wgpu_lora.train.progress import StepResult
from wgpu_lora.train.tasks import task_of

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(device: Device) -> LoadedModel:
    return open_model(str(model_dir("qwen2")), device, "nf4")


def options(**changes: Any) -> dict[str, Any]:
    return {
        "lora_r": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 16,
        "packing": False,
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "logging_steps": 1,
        "save_steps": 3,
    } | changes


def adapters(tmp_path: Path, place: str) -> list[dict[str, Any]]:
    """Three that differ in rank, targets, dropout, weight and length of the run."""
    for seed, name in enumerate("abc"):
        if not (tmp_path / f"{name}.jsonl").exists():
            random_rows(tmp_path / f"{name}.jsonl", 8 + 2 * seed, 301, seed)
            random_rows(tmp_path / f"{name}-heldout.jsonl", 3, 301, seed + 7)
    own: dict[str, dict[str, Any]] = {
        "a": {"dropout": 0.1},
        "b": {"rank": 2, "target_modules": "q_proj,v_proj", "weight": 2},
        "c": {"alpha": 4, "max_steps": 3, "learning_rate": 3e-3},
    }
    return [
        {
            "data": str(tmp_path / f"{name}.jsonl"),
            "eval_data": str(tmp_path / f"{name}-heldout.jsonl"),
            "checkpoint": str(tmp_path / place / name),
            **own[name],
        }
        for name in own
    ]


def together(
    model: LoadedModel, tmp_path: Path, place: str, callback: Callable[[StepResult], None] = lambda r: None, **how: Any
) -> dict[str, Any]:
    output = str(tmp_path / place / "pipeline")
    pipeline = MultiAdapterPipeline(adapters(tmp_path, place), model, output=output, **options(**how))
    return pipeline.train(callback)


def alone(model: LoadedModel, tmp_path: Path) -> None:
    """Each by itself, once for all tests of a directory."""
    for values in adapters(tmp_path, "alone"):
        task = task_of(values, "task")
        base = TrainingArguments(**options(model=model.name))
        prepare_job(task.arguments(base), model).train()


def change(directory: Path, start: Path) -> dict[str, np.ndarray]:
    after, before = load_file(directory / WEIGHTS), load_file(start / WEIGHTS)
    return {name: after[name].astype(np.float64) - before[name] for name in after}


def assert_same(tmp_path: Path, place: str, names: str = "abc") -> None:
    """Within 1e-4 of the change from the initial adapter, by Frobenius norm, tensor by tensor."""
    for name in names:
        got, expected = (load_file(tmp_path / p / name / WEIGHTS) for p in (place, "alone"))
        assert got.keys() == expected.keys()
        begin = load_file(tmp_path / "start" / name / WEIGHTS)
        for key, value in expected.items():
            moved = np.linalg.norm(value.astype(np.float64) - begin[key])
            assert moved > 0
            assert np.linalg.norm(got[key].astype(np.float64) - value) < 1e-4 * moved, f"{name} {key}"


@pytest.fixture(scope="module")
def trained(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every adapter trained alone, and as it was before the first step."""
    tmp_path = tmp_path_factory.mktemp("pipeline")
    alone(model, tmp_path)
    for values in adapters(tmp_path, "start"):
        values["learning_rate"], values["max_steps"] = 0.0, 1
        prepare_job(task_of(values, "task").arguments(TrainingArguments(**options(model=model.name))), model).train()
    return tmp_path


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_together_is_as_alone(model: LoadedModel, trained: Path, schedule: str) -> None:
    seen: list[str] = []
    record = together(model, trained, schedule, lambda result: seen.append(result.adapter), schedule=schedule)
    assert_same(trained, schedule)
    assert [a["stop_reason"] for a in record["adapters"]] == ["epochs", "epochs", "max steps"]
    steps = {a["name"]: a["step"] for a in record["adapters"]}
    assert {name: seen.count(name) for name in "abc"} == steps
    if schedule == "synchronized":
        assert record["step"] == max(steps.values())
        assert seen[:3] == ["a", "b", "c"]
    else:
        assert record["step"] == sum(steps.values())
    if schedule == "round-robin":
        assert seen[:4] == ["a", "b", "c", "a"]
    assert json.loads((trained / schedule / "pipeline" / "pipeline.json").read_text()) == record
