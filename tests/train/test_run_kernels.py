"""The kernels of a run: a right driver is never called wrong, and a resumed run keeps its tilings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.training.training import golden_arguments, model_dir, random_rows, write_rows
from support.training.tuning import verdicts

import wgpu_lora
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import DeviceWarning
from wgpu_lora.gpu import tuner as module
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.tuning_cache import choice_key
from wgpu_lora.gpu.verdicts import Verdicts, verdicts_of
from wgpu_lora.infer.generator import Generator
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.job import Job
from wgpu_lora.train.prepare_job import prepare_job

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
        right = {verdict.kernel for verdict in verdicts_of(device)._all().values() if verdict.right}
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
        (answer,) = generator.generate([ids[0, :4]], [0], max_new_tokens=4)
    assert answer.token_ids == ids[0, 4:8].tolist()
    assert checked() >= FORWARD


# -- the tilings of a run ----------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_tilings(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cache says by then: another tiling rounds differently. The device's next job has its own."""
    monkeypatch.delenv("WGPU_LORA_NO_TUNE")
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    monkeypatch.setattr(Tuner, "_seconds", lambda _, call, tiling: float(tiling == tilings_of(device, call)[0]))
    args = golden_arguments(tmp_path, "qwen3", max_steps=2, save_steps=1)
    model = open_model(args.model, device, "f32")
    job = prepare_job(args, model)
    assert job.tuner()
    job.train()
    first = job.run.state.tiles
    assert [step.tiling for step in heavy(job)] == seconds(device, job)
    assert {step.tiling for step in heavy(job) if step.tiling != tilings_of(device, step)[0]} <= set(first.values())
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: pytest.fail("it was tuned again"))
    again = prepare_job(replace(args, resume=True), model)
    again.train()
    assert again.run.state.tiles == first
    assert [step.tiling for step in heavy(again)] == [step.tiling for step in heavy(job)]
    (tmp_path / "other").mkdir()
    other = prepare_job(golden_arguments(tmp_path / "other", "qwen3", max_steps=1, tune=False), model)
    other.train()
    assert other.run.state.tiles == {}
    assert all(step.tiling == tilings_of(device, step)[0] for step in heavy(other))


def test_a_job_is_the_same_after_another_with_other_tilings(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one model: to the same bits as each alone, and in its own tilings, since many round alike."""
    monkeypatch.delenv("WGPU_LORA_NO_TUNE")
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    monkeypatch.setattr(Tuner, "_seconds", lambda _, call, tiling: float(tiling != tilings_of(device, call)[1]))

    def trained(name: str, model: LoadedModel, tune: bool) -> str:
        monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / name))
        (tmp_path / name).mkdir()
        job = prepare_job(golden_arguments(tmp_path / name, "qwen3", max_steps=2, tune=tune), model)
        digest = job.train().adapter_sha256
        defaults = [tilings_of(device, step)[0] for step in heavy(job)]
        assert [step.tiling for step in heavy(job)] == (seconds(device, job) if tune else defaults)
        return digest

    path = golden_arguments(tmp_path, "qwen3").model or ""
    alone = {tune: trained(f"alone {tune}", open_model(path, device, "f32"), tune) for tune in (True, False)}
    shared = open_model(path, device, "f32")
    assert [trained(f"{i}", shared, tune) == alone[tune] for i, tune in enumerate((True, False, True))] == [True] * 3


def tilings_of(device: Device, call: module.Dispatch) -> Sequence[Tiling]:
    return call.kernel.tilings(device.capabilities, call.constants)


def seconds(device: Device, job: Job) -> list[Tiling]:
    """The second tiling of each heavy dispatch, or of the first one that shares its choice, if it may have that."""
    first: dict[str, Tiling] = {}
    selection = []
    for step in heavy(job):
        tilings = tilings_of(device, step)
        tiling = first.setdefault(choice_key(step.kernel, step.present, step.constants), tilings[1])
        selection.append(tiling if tiling in tilings else tilings[0])
    return selection


def heavy(job: Job) -> list[module.Dispatch]:
    """The dispatches of a job's only training program that are tuned."""
    (bucket,) = job.session.built
    return [step for step in job.session.steps[bucket].program.dispatches if step.kernel.tuning]
