"""Runs with other optimizers than AdamW: resumed with the same bytes, alone and with several adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.training import golden_arguments, model_dir, random_rows

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli.run_summary import describe_memory
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.run_checkpoint import MANIFEST, write_manifest

FILES = ("adapter_model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def model(device: Device) -> LoadedModel:
    return open_model(str(model_dir("qwen2")), device, "nf4")


def train(model: LoadedModel, directory: Path, optim: str, **changes: Any) -> RunRecord:
    directory.mkdir(exist_ok=True)
    options = {"init_adapter": None, "lora_r": 96, "target_modules": "q_proj", "lr_scheduler_type": "constant"}
    args = golden_arguments(directory, "qwen2", optim=optim, loraplus_lr_ratio=4.0, save_steps=2, **options | changes)
    return prepare_job(args, model).train()


def test_resuming(model: LoadedModel, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "a", "adamw_8bit", max_steps=4)
    train(model, tmp_path / "b", "adamw_8bit", max_steps=2)
    resumed = train(model, tmp_path / "b", "adamw_8bit", max_steps=4, resume=True)
    assert resumed.options.loraplus_lr_ratio == 4.0
    assert whole.adapter_sha256 == resumed.adapter_sha256
    last = [tmp_path / name / "run" / "checkpoints" / "step-4" for name in "ab"]
    for file in FILES:
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()
    types = {values.dtype.name for values in load_file(last[0] / FILES[1]).values()}
    assert types == {"uint8", "float32"}
    with pytest.raises(UserError, match="optim was 'adamw_8bit', not 'lion'"):
        train(model, tmp_path / "b", "lion", max_steps=6, resume=True)


def test_a_state_in_the_same_form_of_another_optimizer(model: LoadedModel, tmp_path: Path) -> None:
    """As those of lion and muon: refused by name, and nothing is written."""
    steps = {}
    for optim in ("lion", "muon"):
        train(model, tmp_path / optim, optim, max_steps=1)
        steps[optim] = tmp_path / optim / "run" / "checkpoints" / "step-1"
    (steps["lion"] / FILES[1]).write_bytes((steps["muon"] / FILES[1]).read_bytes())
    (steps["lion"] / MANIFEST).unlink()
    write_manifest(steps["lion"])
    before = {path: path.stat().st_mtime_ns for path in steps["lion"].parent.rglob("*")}
    with pytest.raises(UserError, match=r"optimizer.safetensors .* holds the state of 'muon', not of 'lion'"):
        train(model, tmp_path / "lion", "lion", max_steps=2, resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in steps["lion"].parent.rglob("*")}


def test_several_adapters(model: LoadedModel, tmp_path: Path) -> None:
    """Of different ranks and ratios of LoRA+, with Muon: resumed with the same bytes."""
    data = str(random_rows(tmp_path / "rows.jsonl", 8, 301))
    own: dict[str, dict[str, Any]] = {"a": {"rank": 4}, "b": {"rank": 2, "loraplus_lr_ratio": 8.0}}
    shared: dict[str, Any] = {
        "optim": "muon",
        "target_modules": "q_proj,down_proj",
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": 16,
        "packing": False,
        "learning_rate": 1e-2,
    }

    def together(place: str, **how: Any) -> list[dict[str, np.ndarray]]:
        tasks = [{"data": data, "checkpoint": str(tmp_path / place / name), **values} for name, values in own.items()]
        MultiAdapterPipeline(tasks, model, output=str(tmp_path / place / "all"), **shared | how).train()
        return [load_file(tmp_path / place / name / FILES[0]) for name in own]

    whole = together("whole", max_steps=2)
    together("parts", max_steps=1)
    for one, other in zip(whole, together("parts", max_steps=2, resume=True), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_what_the_plan_says(model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for optim in ("adamw", "adamw_8bit", "sgd"):
        args = golden_arguments(tmp_path, "qwen2", optim=optim, init_adapter=None, lora_r=96, target_modules="q_proj")
        describe_memory(prepare_job(args, model))
        captured = capsys.readouterr()
        said[optim] = next(line for line in (captured.out + captured.err).splitlines() if line.startswith("optimizer"))
    assert "adamw: 512.0 KiB (524,288 bytes) of state, 13.79 bytes per trained parameter" in said["adamw"]  # in pages
    assert "adamw_8bit: 80.2 KiB (82,144 bytes) of state, 2.16 bytes per trained parameter" in said["adamw_8bit"]
    assert said["sgd"].split() == ["optimizer", "sgd:", "no", "state"]
