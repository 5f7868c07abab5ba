"""Runs with all kernels checked: a driver that is right is never called wrong, whatever the values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.training import model_dir, random_rows, write_rows

import wgpu_lora
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import DeviceWarning
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.verdicts import Verdicts, verdicts_of
from wgpu_lora.infer import Generator, load_adapters
from wgpu_lora.models.loaded_model import open_model

pytestmark = pytest.mark.filterwarnings(f"error::{DeviceWarning.__module__}.{DeviceWarning.__name__}")
OPTIONS = {
    "lora_r": 8,
    "max_length": 16,
    "packing": False,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "save_steps": 0,
    "lr_scheduler_type": "constant",
}
FORWARD = {"gather_rows", "rmsnorm_forward", "rope_forward", "attention_forward", "swiglu_forward"}
LOSS = {"softmax_chunk", "target_logprobs", "sum_by_slot"}
TRAINING = FORWARD | LOSS | {"logprob_gradient", "rmsnorm_backward", "rope_backward", "swiglu_backward", "adamw"}


@pytest.fixture
def checked(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Forgets all verdicts; returns the kernels that were found right before."""
    monkeypatch.delenv("WGPU_LORA_NO_CHECK")
    numbers = count()

    def forget() -> set[str]:
        right = {found.kernel for found in verdicts_of(device)._all().values() if found.right}
        monkeypatch.setattr(device, "verdicts", Verdicts(device, tmp_path / f"cache {next(numbers)}"))
        return right

    forget()
    return forget


@pytest.mark.parametrize(
    ("architecture", "base_dtype", "rounded_to"),
    [("qwen2", "nf4", "f32"), ("qwen3", "f32", "f32"), ("llama", "nf4", "bf16"), ("mistral", "nf4", "f16")],
)
def test_right_kernels_are_never_called_wrong(
    device: Device,
    tmp_path: Path,
    checked: Callable[[], set[str]],
    architecture: str,
    base_dtype: str,
    rounded_to: str,
) -> None:
    """Two adapters, one of them with dropout."""
    model = open_model(str(model_dir(architecture)), device, base_dtype)
    adapters = [
        {
            "data": str(random_rows(tmp_path / f"{i}.jsonl", 2, 200, i)),
            "checkpoint": str(tmp_path / f"adapter {i}"),
            "dropout": 0.1 * i,
        }
        for i in range(2)
    ]
    options = {**OPTIONS, "compute_dtype": rounded_to, "activation_dtype": rounded_to, "learning_rate": 1e-3}
    MultiAdapterPipeline(adapters, model, output=str(tmp_path / "pipeline"), max_steps=1, **options).train()
    assert TRAINING | {"dropout_apply"} <= checked()


@pytest.mark.drivers
def test_nor_where_a_model_is_certain(device: Device, tmp_path: Path, checked: Callable[[], set[str]]) -> None:
    """It has learned a row by heart, so its losses are what rounding leaves, and its gradients almost zero."""
    directory = tmp_path / "model"
    shutil.copytree(model_dir("qwen3"), directory)
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] *= 20  # the tiny model's logits are small
    save_file(weights, file, {"format": "pt"})
    model = open_model(str(directory), device, "nf4")
    ids = np.arange(3, 19, dtype=np.int32)[None] * 7
    heart = str(write_rows(tmp_path / "heart.jsonl", ids, ids, np.array([16])))
    options: dict[str, Any] = {**OPTIONS, "data": heart, "lora_alpha": 64, "learning_rate": 3e-3}
    learned = tmp_path / "learned"
    verdicts_of(device).enabled = False
    assert wgpu_lora.finetune(model, output=str(learned), max_steps=60, **options).loss < 1e-5
    verdicts_of(device).enabled = True
    again = {"init_adapter": str(learned), "max_steps": 2, "eval_data": heart}
    wgpu_lora.finetune(model, output=str(tmp_path / "again"), **options | again)
    assert checked() >= FORWARD  # where terms cancel out, values show nothing
    assert wgpu_lora.evaluate(model, heart, adapter=learned).loss < 1e-5
    assert checked() >= FORWARD
    adapters = load_adapters(device, model.config, [learned])
    with Generator(model, adapters, capacity=16, batch=1, buckets=(16,)) as generator:
        (found,) = generator.generate([ids[0, :4]], [0], max_new_tokens=4)
    assert found.token_ids == ids[0, 4:8].tolist()
    assert checked() >= FORWARD
