"""A device that stops working at any point: a typed error, and the last checkpoint is as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.events import hearing
from support.models import load
from support.training import golden_arguments

from wgpu_lora.bench.device_ceilings import measure_ceilings
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import DeviceLost
from wgpu_lora.infer import Generator
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.session.session import Session

ABORTED = """
import sys
from wgpu_lora.cli import main
from wgpu_lora.gpu import device
from wgpu_lora.gpu.device_errors import raise_device_lost

class Lost(device.Device):
    def __init__(self, selector=None):
        super().__init__(selector)
        self.raw.destroy()
        with raise_device_lost(self.info.name):
            self.raw.queue.submit([])  # wgpu-native aborts

device.Device = Lost
sys.exit(main(["info"]))
"""


@pytest.fixture
def own() -> Device:
    """A device to lose."""
    return Device()


def train(device: Device, tmp_path: Path, events: Events, **changes: Any) -> None:
    args = golden_arguments(tmp_path, "qwen2", **{"max_steps": 4, "save_steps": 1, "tune": False, **changes})
    prepare_job(args, open_model(args.model, device, "f32")).train(events)


def saved(tmp_path: Path) -> list[int]:
    found = run_checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    for _, directory in found:
        read_adapter(directory)
    return [step for step, _ in found]


def test_lost_in_a_step(device: Device, own: Device, tmp_path: Path) -> None:
    def lose(result: StepResult) -> None:
        if result.step == 2:
            own.raw.destroy()

    with pytest.raises(DeviceLost, match=r"The device .* was lost.*resume=True"):
        train(own, tmp_path, hearing(step=lose))
    assert saved(tmp_path) == [1]  # lost before step 2 was saved
    train(device, tmp_path, SILENT, resume=True)
    assert saved(tmp_path)[-1] == 4


def test_lost_while_saving(own: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = AdapterRun.write_checkpoint

    def lose(self: AdapterRun, session: Session, final: Path) -> None:
        if self.state.step == 2:  # the adapter is still read back, the optimizer's state is not
            read = Device.read
            monkeypatch.setattr(Device, "read", lambda *given: (read(*given), own.raw.destroy())[0])
        save(self, session, final)

    monkeypatch.setattr(AdapterRun, "write_checkpoint", lose)
    with pytest.raises(DeviceLost):
        train(own, tmp_path, SILENT)
    assert saved(tmp_path) == [1]


def test_lost_while_tuning(own: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the tiling."""
    monkeypatch.delenv("WGPU_LORA_NO_TUNE")
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DeviceLost):
        train(own, tmp_path, hearing(tuning=lambda _: own.raw.destroy()), tune=True)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_lost_in_a_generation_and_a_benchmark(own: Device) -> None:
    with Generator(load("qwen2", own), capacity=8, buckets=(4,)) as generator, pytest.raises(DeviceLost):
        generator.generate([[1, 2, 3, 4]], max_new_tokens=3, on_token=lambda *_: own.raw.destroy())
    with pytest.raises(DeviceLost):
        measure_ceilings(own)


def test_a_process_that_wgpu_native_aborts_says_why() -> None:
    ended = subprocess.run([sys.executable, "-c", ABORTED], capture_output=True, text=True)
    assert ended.returncode == 2
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("wgpu-lora: The device ")
    assert "--resume" in said
