"""The tilings of a run: resumed with it, and of no other job."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.training import golden_arguments
from support.tuning import verdicts

from wgpu_lora.gpu import tuner as module
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.tuning_cache import choice_key
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import Job, prepare_job


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
    found = []
    for step in heavy(job):
        tilings = tilings_of(device, step)
        chosen = first.setdefault(choice_key(step.kernel, step.present, step.constants), tilings[1])
        found.append(chosen if chosen in tilings else tilings[0])
    return found


def heavy(job: Job) -> list[module.Dispatch]:
    """The dispatches of a job's only training program that are tuned."""
    (bucket,) = job.session.built
    return [step for step in job.session.steps[bucket].program.dispatches if step.kernel.tuning]
