"""What training keeps and shares, for architectures beyond the ones of `test_resume.py` and `test_pipeline.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.events import hearing
from support.models import ARCHITECTURES
from support.sampling import sample
from support.training import model_dir, random_rows

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.formats.peft_adapter import WEIGHTS
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments

LATER = [name for name in ARCHITECTURES if name not in ("qwen2", "qwen3", "llama", "mistral")]
OPTIONS: dict[str, Any] = {
    "lora_r": 4, "max_length": 16, "packing": False, "per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2,
    "gradient_accumulation_steps": 1, "learning_rate": 2e-3, "warmup_ratio": 0.0, "adam_epsilon": 1e-5,
}  # fmt: skip


def change(directory: Path, start: Path) -> dict[str, np.ndarray]:
    after, before = load_file(directory / WEIGHTS), load_file(start / WEIGHTS)
    return {name: after[name].astype(np.float64) - before[name] for name in after}


@pytest.mark.parametrize("architecture", sample(LATER, 1 / 2))
def test_a_stopped_run_resumes_byte_for_byte(device: Device, tmp_path: Path, architecture: str) -> None:
    data, name = random_rows(tmp_path / "rows.jsonl", 8, 140), str(model_dir(architecture))
    options = {**OPTIONS, "model": name, "data": str(data), "lora_dropout": 0.1}

    def train(place: str, stop_after: int = 0, **more: Any) -> bytes:
        args = TrainingArguments(**options, output=str(tmp_path / place), **more)
        prepare_job(args, open_model(name, device)).train(hearing(step=lambda result: result.step == stop_after))
        return (tmp_path / place / WEIGHTS).read_bytes()

    whole = train("whole")
    assert train("stopped", stop_after=2) != whole
    assert train("stopped", resume=True) == whole


@pytest.mark.parametrize("architecture", sample(LATER, 1 / 2))
def test_adapters_together_are_as_alone(device: Device, tmp_path: Path, architecture: str) -> None:
    """Of different ranks and modules, in shared batches. Within 1e-4 of the change, by Frobenius norm."""
    model: LoadedModel = open_model(str(model_dir(architecture)), device)
    own: dict[str, dict[str, Any]] = {"a": {}, "b": {"rank": 2, "target_modules": "attention"}}
    for seed, each in enumerate(own):
        own[each]["data"] = str(random_rows(tmp_path / f"{each}.jsonl", 8, 140, seed))
    tasks = [{"checkpoint": str(tmp_path / name), **values} for name, values in own.items()]
    shared = {name: value for name, value in OPTIONS.items() if name != "save_steps"}
    MultiAdapterPipeline(tasks, model, output=str(tmp_path / "pipeline"), **shared).train()
    for name, values in own.items():
        said = {"lora_r" if key == "rank" else key: value for key, value in values.items()}
        for place, steps in (("alone", {}), ("start", {"learning_rate": 0.0, "max_steps": 1})):
            output = str(tmp_path / place / name)
            args = TrainingArguments(**{**shared, **said, **steps, "model": model.name, "output": output})
            prepare_job(args, model).train()
        start = tmp_path / "start" / name
        moved, expected = change(tmp_path / name, start), change(tmp_path / "alone" / name, start)
        for key, value in expected.items():
            assert np.linalg.norm(moved[key] - value) < 1e-4 * np.linalg.norm(value), f"{name} {key}"
