"""Gradients and 30-step loss curves of the trainer, compared with PEFT's (tests/fixtures/README.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import short_of
from support.events import hearing
from support.models import ARCHITECTURES, golden
from support.sampling import sample
from support.training.shared_runs import assert_close_adapters
from support.training.training import golden_job, gradients_of, model_dir, random_rows

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.formats.peft_adapter import WEIGHTS, read_adapter
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models import layer_context
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.ops.linear.linear import linears
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log

CASES = [(architecture, base) for architecture in ARCHITECTURES for base in ("f32", "nf4")]


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("architecture", "base", "recompute"), [(*case, case[1] == "nf4") for case in CASES])
def test_gradients_match(device: Device, tmp_path: Path, architecture: str, base: str, recompute: bool) -> None:
    """Every adapter's gradient through the whole decoder; half of the cases recompute activations."""
    job = golden_job(device, tmp_path, architecture, base, gradient_checkpointing=recompute)
    loss, gradients = gradients_of(job, device, architecture)
    values = golden(architecture)
    assert loss == pytest.approx(values[f"loss.{base}"][0], rel=1e-5)
    for name, gradient in gradients.items():
        assert relative(gradient, values[f"grad.{base}.{name}"]) < 2e-5, name


@pytest.mark.parametrize(("architecture", "recompute"), [("qwen2", False), ("qwen3", True)])
def test_gradients_match_where_q_k_and_v_together_exceed_a_binding(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, recompute: bool
) -> None:
    """They are products, and rotations, of their own then, with biases (Qwen2) and with norms of heads (Qwen3)."""
    storages: list[int] = []

    def limited(*args: Any, **options: Any) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(device, "max_binding", 256)
            outputs = linears(*args, **options)
        storages.append(len({y.storage for y in outputs}))
        return outputs

    monkeypatch.setattr(layer_context, "adapted_linears", limited)
    job = golden_job(device, tmp_path, architecture, "nf4", gradient_checkpointing=recompute)
    assert set(storages) == {1, 3}  # of gate and up, which are computed in blocks of rows, and of q, k and v
    loss, gradients = gradients_of(job, device, architecture)
    values = golden(architecture)
    assert loss == pytest.approx(values["loss.nf4"][0], rel=1e-5)
    for name, gradient in gradients.items():
        assert relative(gradient, values[f"grad.nf4.{name}"]) < 2e-5, name


@pytest.mark.parametrize(("kind", "bound"), [("bf16", 4e-2), ("f16", 5e-3)])
def test_half_operands_round_and_no_more(device: Device, tmp_path: Path, kind: str, bound: float) -> None:
    """Gradients differ by what operands of 8 and 11 bits explain, but are not equal, so the option has an effect."""
    job = golden_job(device, tmp_path, "qwen3", "nf4", compute_dtype=kind, gradient_checkpointing=kind == "f16")
    loss, gradients = gradients_of(job, device, "qwen3")
    values = golden("qwen3")
    assert loss == pytest.approx(values["loss.nf4"][0], rel=bound / 10)
    for name, gradient in gradients.items():
        expected = values[f"grad.nf4.{name}"]
        error = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert 1e-5 < error < bound, f"{name}: {error}"


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        pytest.param(*case, marks=pytest.mark.drivers) if case in (("qwen3", "nf4"), ("gemma2", "nf4")) else case
        for case in CASES
    ],
)
def test_curve_matches_peft(device: Device, tmp_path: Path, architecture: str, base: str) -> None:
    """30 steps: losses, clipped norms and learning rates equal PEFT's; final weights are within 1e-3 of the change."""
    job = golden_job(device, tmp_path, architecture, base)
    record = job.train()
    values = golden(architecture)
    assert record.stop_reason == "max steps"
    log = read_log(tmp_path / "run" / LOG)
    assert [line["step"] for line in log] == list(range(1, 31))
    assert [line["learning_rate"] for line in log] == pytest.approx(
        values["learning_rates"].tolist(), rel=1e-6, abs=1e-9
    )
    assert [line["loss"] for line in log] == pytest.approx(values[f"losses.{base}"].tolist(), rel=1e-3)
    assert [line["grad_norm"] for line in log] == pytest.approx(values[f"grad_norms.{base}"].tolist(), rel=1e-3)
    _, matrices = read_adapter(tmp_path / "run")
    for module, pair in matrices.items():
        for part, matrix in zip("AB", pair, strict=True):
            name = f"{short_of(module)}.{part}"
            first, final = values[f"adapter.{name}"], values[f"final.{base}.{name}"]
            error = np.linalg.norm(matrix - final) / np.linalg.norm(final - first)
            assert error < 1e-3, f"{name}: {error}"


def test_a_curve_within_default_limits(tmp_path: Path) -> None:
    limited = Device(options=replace(DeviceOptions.from_environment(), default_limits=True))
    test_curve_matches_peft(limited, tmp_path, "qwen3", "nf4")


def test_packing_and_accumulation_do_not_change_the_result(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows per step: in four batches of two, eight of one, one packed batch, or one whose MLP runs in blocks of
    rows, as with small bindings. Dropout is on, and its masks stay the same."""
    ways = [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "packing": True},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "packing": True},
    ]
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number == 3:
            monkeypatch.setattr(Recorder, "row_blocks", lambda _, rows, __: [(0, 64), (64, rows)])
        job = golden_job(device, folder, "qwen2", "nf4", max_steps=2, warmup_ratio=0.0, lora_dropout=0.1, **way)
        assert [len(step) for step in job.run.stream.epoch(0)] == [way["gradient_accumulation_steps"]]
        if way.get("packing"):
            assert len(job.run.stream.epoch(0)[0][0]) == 8
        job.train()
    assert max(job.session.steps) > 64, "there was only one row block"
    for number in (1, 2, 3):
        assert_close_adapters(tmp_path / str(number) / "run", tmp_path / "0" / "run", 1e-5)


# -- resuming and sharing batches, of architectures beyond those of test_resume.py and test_multi_adapter.py -----------

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
    for seed, adapter in enumerate(own):
        own[adapter]["data"] = str(random_rows(tmp_path / f"{adapter}.jsonl", 8, 140, seed))
    tasks = [{"checkpoint": str(tmp_path / name), **values} for name, values in own.items()]
    shared = {name: value for name, value in OPTIONS.items() if name != "save_steps"}
    MultiAdapterPipeline(tasks, model, output=str(tmp_path / "pipeline"), **shared).train()
    for name, values in own.items():
        options_of = {"lora_r" if key == "rank" else key: value for key, value in values.items()}
        for place, steps in (("alone", {}), ("start", {"learning_rate": 0.0, "max_steps": 1})):
            output = str(tmp_path / place / name)
            args = TrainingArguments(**{**shared, **options_of, **steps, "model": model.name, "output": output})
            prepare_job(args, model).train()
        start = tmp_path / "start" / name
        moved, expected = change(tmp_path / name, start), change(tmp_path / "alone" / name, start)
        for key, value in expected.items():
            assert np.linalg.norm(moved[key] - value) < 1e-4 * np.linalg.norm(value), f"{name} {key}"
