"""How a run ends when it is asked to, and when the reader of its output disappears."""

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
from support.sampling import sample

from wgpu_lora.cli import main
from wgpu_lora.gpu.device import Device

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
    assert process.stdout
    assert process.stderr
    until(trained(out, 1))
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
    said = process.stderr.read().splitlines()
    assert [line for line in said if not line.startswith("compiling the kernels")] == []
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
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
