"""A tensor larger than one binding of the device: its numbers, and which options to lower."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import load
from support.training import golden_arguments

from wgpu_lora.bench.training_step import TrainingStep, chosen_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.infer.generator import Generator
from wgpu_lora.names.spelling import COMMAND_LINE, IN_FILE, PYTHON, Naming, naming
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments


@pytest.mark.parametrize(
    ("spelling", "options"),
    [
        (PYTHON, "per_device_train_batch_size or max_length"),
        (COMMAND_LINE, "--per-device-train-batch-size or --max-length"),
        (IN_FILE, "'per_device_train_batch_size' or 'max_length'"),
    ],
)
def test_in_training(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: Naming, options: str
) -> None:
    monkeypatch.setattr(device, "max_binding", 1 << 14)
    with naming(spelling), pytest.raises(BindingTooLarge) as caught:
        prepare_job(golden_arguments(tmp_path, "qwen2"), load("qwen2", device, "f32")).check_memory()
    error = caught.value
    assert (error.what, error.limit, error.nbytes > error.limit) == ("linears", 1 << 14, True)
    fact = f"The tensor 'linears' needs {error.nbytes:,} bytes, but one binding of this device holds at most 16,384"
    assert str(error) == f"{fact}: lower {options}."


def test_a_batch_is_limited_by_its_largest_tensor(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """q of Qwen3-0.6B is 128 MiB at 16 rows of 1,024 tokens; with k and v it is twice that."""
    monkeypatch.setattr(device, "max_binding", 128 << 20)
    model = chosen_model(None, "qwen3-0.6b", 1, device)

    def peak(rows: int) -> int:
        args = TrainingArguments(per_device_train_batch_size=rows, max_length=1024)
        return TrainingStep(model, args).session.memory().peak

    assert 0 < peak(8) < peak(16)
    with pytest.raises(BindingTooLarge):
        peak(17)


@pytest.mark.parametrize(("limit", "what"), [(1 << 12, "values of 2 sequences of 64 tokens"), (1 << 14, "linears")])
def test_in_generation(device: Device, monkeypatch: pytest.MonkeyPatch, limit: int, what: str) -> None:
    model, before = load("qwen2", device, "f32"), device.allocated
    monkeypatch.setattr(device, "max_binding", limit)
    with pytest.raises(
        BindingTooLarge, match=r": use shorter prompts and answers, fewer at a time, or a smaller"
    ) as caught:
        Generator(model, capacity=64, batch=2 if limit == 1 << 12 else 1)
    assert (caught.value.what, caught.value.limit) == (what, limit)
    assert device.allocated == before
