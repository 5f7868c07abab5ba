"""How a run ends when it is asked to, when the reader of its output disappears, and when its device is lost."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.cli import QWEN2, SMALL, flags, write_rows
from support.events import hearing
from support.models import load
from support.sampling import sample
from support.training.training import golden_arguments

from wgpu_lora.bench.device_ceilings import measure_ceilings
from wgpu_lora.cli.app import main
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import DeviceLost
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.session.session import Session

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMMAND = [sys.executable, "-m", "wgpu_lora"]


def finetune(tmp_path: Path, *more: str, **options: Any) -> list[str]:
    data = write_rows(tmp_path / "rows.jsonl")
    whole = {**SMALL, "model": QWEN2, "data": data, "output": tmp_path / "out", "max_steps": 20_000, **options}
    return [*COMMAND, "finetune", "--no-tune", *flags(**whole), *more]


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that handle signals, even if the tests were started ignoring them; ends them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str], ignored: Sequence[int] = (), **options: Any) -> subprocess.Popen[str]:
        def dispose() -> None:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, **{**pipes, "text": True, "preexec_fn": dispose, **options}))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def trained(out: Path, steps: int) -> Callable[[], bool]:
    return lambda: (out / "log.jsonl").is_file() and (out / "log.jsonl").read_bytes().count(b"\n") >= steps


def listening(process: subprocess.Popen[str]) -> bool:
    """Whether our first line has run; before that, Python handles signals, which may take long on a busy machine."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return True
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", sample(SIGNALS, 1 / 3))
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    process, out = start(finetune(tmp_path)), tmp_path / "out"
    until(trained(out, 3))
    process.send_signal(number)
    printed, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert f"finetune --output {out} --resume" in printed
    assert "Traceback" not in err
    facts = json.loads((out / "run.json").read_text())
    assert (facts["stop_reason"], facts["signal"]) == ("interrupt", number.name)
    assert (out / "checkpoints" / f"step-{facts['state']['step']}" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("number", "delay"), [(signal.SIGINT, 0.0), (signal.SIGINT, 0.5), (signal.SIGTERM, 0.2), (signal.SIGHUP, 0.8)]
)
def test_a_signal_during_the_start_ends_it_with_its_code(
    start: Start, tmp_path: Path, number: signal.Signals, delay: float
) -> None:
    """At any moment: during imports, while the model loads, or while the first step compiles."""
    process, out = start(finetune(tmp_path)), tmp_path / "out"
    until(lambda: listening(process))
    time.sleep(delay)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert (out / "adapter_config.json").exists() == (out / "run.json").exists()


def test_neither_ignored_signals_nor_a_reader_that_leaves_end_a_run(start: Start, tmp_path: Path) -> None:
    """Signals are ignored under nohup, and by background jobs of a shell."""
    process = start(finetune(tmp_path, max_steps=20), ignored=(signal.SIGHUP, signal.SIGINT))
    out = tmp_path / "out"
    until(trained(out, 1))
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
    lines = process.stderr.read().splitlines()
    assert [line for line in lines if not line.startswith("compiling the kernels")] == []
    facts = json.loads((out / "run.json").read_text())
    assert (facts["state"]["step"], facts["stop_reason"]) == (20, "max steps")
    assert load_file(out / "adapter_model.safetensors")


def test_a_log_that_is_full_does_not_end_a_run(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines about steps that cannot be shown are dropped; a missing last line is an error."""

    def full(label: str, text: str) -> None:
        if label in ("step", "finished"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(import_module("wgpu_lora.cli.finetune"), "line", full)
    command = finetune(tmp_path, max_steps=4)[len(COMMAND) :]
    assert main(command) == 2
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"]["step"] == 4
    assert "No space left on device" in capsys.readouterr().err


def test_a_terminal_that_closes(start: Start, tmp_path: Path) -> None:
    """Closing the window sends SIGHUP, and every write fails from then on."""
    ours, theirs = pty.openpty()
    process = start(finetune(tmp_path), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    out = tmp_path / "out"
    until(trained(out, 2))
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 128 + signal.SIGHUP
    assert json.loads((out / "run.json").read_text())["stop_reason"] == "interrupt"


@pytest.mark.parametrize("command", sample([["info"], ["--help"], ["recipes", "list"], ["finetune", "--help"]], 1 / 2))
def test_output_that_nobody_reads_is_silence(start: Start, command: list[str]) -> None:
    process = start([*COMMAND, *command])
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


# -- a device that stops working at any point --------------------------------------------------------------------------

ABORTED = """
import sys
from wgpu_lora.cli.app import main
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


def train_golden(device: Device, tmp_path: Path, events: Events, **changes: Any) -> None:
    args = golden_arguments(tmp_path, "qwen2", **{"max_steps": 4, "save_steps": 1, "tune": False, **changes})
    prepare_job(args, open_model(args.model, device, "f32")).train(events)


def saved(tmp_path: Path) -> list[int]:
    checkpoints = run_checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    for _, directory in checkpoints:
        read_adapter(directory)
    return [step for step, _ in checkpoints]


def test_lost_in_a_step(device: Device, own: Device, tmp_path: Path) -> None:
    def lose(result: StepResult) -> None:
        if result.step == 2:
            own.raw.destroy()

    with pytest.raises(DeviceLost, match=r"The device .* was lost.*resume=True"):
        train_golden(own, tmp_path, hearing(step=lose))
    assert saved(tmp_path) == [1]  # lost before step 2 was saved
    train_golden(device, tmp_path, SILENT, resume=True)
    assert saved(tmp_path)[-1] == 4


def test_lost_while_saving(own: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = AdapterRun.write_checkpoint

    def lose(self: AdapterRun, session: Session, final: Path) -> None:
        if self.state.step == 2:  # the adapter is still read back, the optimizer's state is not
            read = Device.read
            monkeypatch.setattr(Device, "read", lambda *arguments: (read(*arguments), own.raw.destroy())[0])
        save(self, session, final)

    monkeypatch.setattr(AdapterRun, "write_checkpoint", lose)
    with pytest.raises(DeviceLost):
        train_golden(own, tmp_path, SILENT)
    assert saved(tmp_path) == [1]


def test_lost_while_tuning(own: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the tiling."""
    monkeypatch.delenv("WGPU_LORA_NO_TUNE")
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DeviceLost):
        train_golden(own, tmp_path, hearing(tuning=lambda _: own.raw.destroy()), tune=True)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_lost_in_a_generation_and_a_benchmark(own: Device) -> None:
    with Generator(load("qwen2", own), capacity=8, buckets=(4,)) as generator, pytest.raises(DeviceLost):
        generator.generate([[1, 2, 3, 4]], max_new_tokens=3, on_token=lambda *_: own.raw.destroy())
    with pytest.raises(DeviceLost):
        measure_ceilings(own)


def test_a_process_that_wgpu_native_aborts_says_why() -> None:
    ended = subprocess.run([sys.executable, "-c", ABORTED], capture_output=True, text=True)
    assert ended.returncode == 2
    message = ended.stderr.splitlines()[-1]
    assert message.startswith("wgpu-lora: The device ")
    assert "--resume" in message
