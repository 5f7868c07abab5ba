"""The plan, what is allocated, resident memory, and tensors that are larger than one binding of the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.models import load
from support.training import golden_arguments, random_rows

from wgpu_lora.bench.training_step import TrainingStep, chosen_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.device_list import list_devices
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.names.spelling import COMMAND_LINE, IN_FILE, PYTHON, Naming, naming
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments

# A process of its own, so that its resident memory is that of this run: prints bytes as JSON.
CHILD = """
import json, sys
import psutil
from wgpu_lora.events import Events
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.finetune import prepare_job
model, data, output = sys.argv[1:]
def resident():
    return psutil.Process().memory_info().rss
# A run on a tiny model first: drivers, compilers and libraries are then in memory already.
warm = TrainingArguments(model=sys.argv[1] + "-tiny", data=data, output=output + "-warm", max_steps=2, max_length=16,
                         per_device_train_batch_size=1, gradient_accumulation_steps=1, base_dtype="f32")
job = prepare_job(warm)
job.train()
device = job.session.device
args = TrainingArguments(model=model, data=data, output=output, max_steps=2, max_length=16, base_dtype="f32",
                         per_device_train_batch_size=1, gradient_accumulation_steps=1)
before, held = resident(), device.allocated
job = prepare_job(args, open_model(model, device, "f32"))
planned = job.session.memory().peak
highest = [0]
loading = []
class Watching(Events):
    def step(self, result):
        highest.append(resident())
    def loading(self, *tensor):
        loading.append(resident())
job.train(Watching())
print(json.dumps({"planned": planned, "allocated": device.peak_allocated - held, "resident": max(highest) - before,
                  "loading": max(loading) - before}))
"""


def make_model(directory: Path, hidden: int, layers: int) -> Path:
    """A random Qwen3 with f32 weights."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = parse_config(config).parameter_shapes()
    tensors = {n: (rng.standard_normal(shape) * 0.02).astype(np.float32) for n, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.slow
@pytest.mark.skipif(
    list_devices()[0].kind != "software", reason="needs a software driver, whose memory is the process's own"
)
def test_resident_memory_is_what_was_planned(tmp_path: Path) -> None:
    """About 240 MB of weights: plan = allocation to the byte; resident memory within 15% plus 48 MB for the driver."""
    make_model(tmp_path / "model", 1024, 4)
    make_model(tmp_path / "model-tiny", 64, 1)
    data = random_rows(tmp_path / "rows.jsonl", 4, 512)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(data), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["planned"] == seen["allocated"]
    assert abs(seen["resident"] - seen["planned"]) < 0.15 * seen["planned"] + (48 << 20), seen
    # While loading, the host holds a piece of one tensor, not the model.
    assert seen["loading"] - seen["planned"] < 512 << 20, seen


# -- tensors larger than one binding of the device ---------------------------------------------------------------------


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
