"""The command line, run in this process: exit codes, one line for every mistake, and a small run from end to end."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cli import QWEN2, ROWS, SMALL, Run, flags, write_rows
from support.training.tuning import verdicts

from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.gpu.backends.wgpu_native import WgpuNative
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import Budget
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.train.memory import check_memory
from wgpu_lora.train.options.training_arguments import TrainingArguments


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


# -- the shell of it -------------------------------------------------------------------------------------------------


def test_help_and_version(run: Run):
    assert "finetune" in run().out
    help_text = run("finetune", "--help-all").out
    assert help_text.index("Adapter:") < help_text.index("Optimisation:")
    for name in ("--learning-rate", "--packing / --no-packing", "--memory-budget", "--recipe"):
        assert name in help_text
    assert run("--version").out.startswith("wgpu-lora ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zork"], "No such option: --zork"),
        (["zork"], "No such command 'zork'"),
        (["finetune", "--lerning-rate", "1"], "--learning-rate"),
        (["finetune", "--learning-rate", "x"], "--learning-rate"),
        (["finetune", "--learning-rate", "-1"], "--learning-rate must be 0 or more"),
        (["finetune", "--model", QWEN2], "--data is missing"),
        (["finetune", "--recipe", "zork"], "The recipe zork does not exist"),
        (["evaluate"], "--data"),
        (["generate", "--prompt", ""], "The prompt is empty"),
        (["generate", "--prompt", "a", "--adapter", "nowhere"], "nowhere is not a directory"),
        (["generate", "--prompt", "a", "--model", "./nowhere"], "./nowhere does not exist"),
        (["generate", "--prompt", "a", "--model", QWEN2], "has no tokenizer.json"),
        (["generate", "--prompt", "a", "--device", "zork"], "No device is named 'zork'"),
        (["generate", "--prompt", "a", "--base-dtype", "fp8"], "--base-dtype fp8"),
        (["info", "--device", "99"], "There is no device 99"),
        (["generate", "--prompt", "a\udcff"], "The prompt is not valid UTF-8"),
        (["generate", "--prompt", "a", "--system", "a\udcff"], "The system prompt is not valid UTF-8"),
        (["finetune", "--output", ""], "--output is empty"),
        (["plan", "--data", " "], "--data is empty"),
        (["generate", "--prompt", "a", "--model", ""], "--model is empty"),
        (["finetune", "--data", os.devnull], "is not a regular file"),
        (["evaluate", "--data", "nowhere"], "There is no data at nowhere"),
        (["evaluate", "--data", "nowhere", "--on-overflow", "zork"], "--on-overflow must be one of truncate, drop"),
        (["evaluate", "--data", "nowhere", "--max-length", 10**6], "is more than this model's 2048 positions"),
        (["demo", "--max-steps", "-3"], "--max-steps must be greater than 0"),
        (["demo", "--show", "-1"], "--show must be 0 or more"),
    ],
)
def test_mistakes_on_the_command_line(run: Run, arguments: list[str], message: str):
    assert message in run(*arguments).refusal()


@pytest.mark.parametrize("piped", [b"a\xff", b" "], ids=["invalid", "blank"])
def test_mistakes_on_stdin(run: Run, monkeypatch: pytest.MonkeyPatch, piped: bytes):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
    assert "The prompt is" in run("generate").refusal()
    monkeypatch.setattr("sys.stdin", None)
    assert "--prompt is missing" in run("generate").refusal()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full, a file that is always full")
@pytest.mark.parametrize("stderr", [subprocess.PIPE, None], ids=["stdout", "both"])
def test_output_that_cannot_be_written(stderr: int | None):
    code = "import sys; from wgpu_lora.cli.app import main; sys.exit(main(['--version']))"
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=stderr or full, text=True, check=False
        )
    assert process.returncode == 2
    assert stderr is None or process.stderr.splitlines() == ["wgpu-lora: No space left on device: while writing."]


def test_no_adapter(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WgpuNative, "adapters", lambda self: [])
    assert "No device was found" in run("info").refusal()


def test_info(run: Run):
    assert "*" in run("info").out
    report = json.loads(run("info", "--json").out)
    assert report["devices"][report["used"]]["index"] == report["used"]
    assert report["adapters"] == report["devices"]  # what 0.1 called them
    assert report["tilings"] in run("info").out


def test_tune(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernel sizes are timed ahead of a run, which then times none; --clear forgets them."""
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    arguments = flags(**{**SMALL, "model": QWEN2, "data": write_rows(tmp_path / "rows.jsonl", ROWS)})
    assert "0 kernel sizes" in run("tune", *arguments, "--seconds", "1e-9").out
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert json.loads(file.read_text())["skipped"]
    assert re.search(r"tuned +[1-9]\d* kernel sizes in", run("tune", *arguments).out)
    content = json.loads(file.read_text())
    assert content["entries"]
    assert not content["skipped"]
    output = run("tune", *arguments).out
    assert "was timed before" in output
    assert str(file) in output
    assert "kernel sizes in" in run("tune", *arguments, "--retune").out
    assert str(file) in run("tune", "--clear").out
    assert not file.exists()
    for wrong, message in (
        (["--clear", "--model", "demo"], "--model does nothing with --clear"),
        ([*arguments, "--seconds", "0"], "--seconds is 0"),
        ([*arguments, "--no-tune"], "--no-tune contradicts"),
    ):
        assert message in run("tune", *wrong).refusal()


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1, 2, 3]}, '{"input_ids": [1, 2'], "line 2: not JSON"),
        ([{"zork": 1}], "line 1"),
        ([{"text": "words"}], "tokenizer"),
        ([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}], "leaves nothing to train on"),
        ([{"input_ids": [1, 10**6]}], "outside of the vocabulary"),
        ([], "is empty"),
    ],
    ids=["broken line", "no format", "text", "untrained", "vocabulary", "empty"],
)
def test_bad_data(run: Run, tmp_path: Path, rows: list[Any], message: str):
    path = write_rows(tmp_path / "bad.jsonl", rows)
    out = tmp_path / "out"
    line = run("finetune", *flags(model=QWEN2, data=path, output=out, **SMALL)).refusal()
    assert message in line
    assert str(path) in line
    assert not out.exists()


def test_output_that_cannot_be_made(run: Run, tmp_path: Path, data: Path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert str(out.parent) in run("finetune", *flags(model=QWEN2, data=data, output=out, **SMALL)).refusal()


def test_what_the_system_refuses_elsewhere(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "somewhere/file")

    monkeypatch.setattr("wgpu_lora.train.training_data.tokenize_source", refuse)
    line = run("finetune", *flags(model=QWEN2, data=data, max_length=16)).refusal()
    assert line == "wgpu-lora: Permission denied: somewhere/file."


# -- memory ----------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_said_before_anything_is_allocated(run: Run, tmp_path: Path, data: Path, device: Device):
    before, out = device.allocated, tmp_path / "out"
    options = {**SMALL, "model": QWEN2, "data": data, "output": out, "memory_budget": "100KiB"}
    line = run("finetune", *flags(**options)).refusal()
    assert "the budget is 100.0 KiB (--memory-budget)" in line
    assert "--max-length" in line
    assert device.allocated == before
    assert not out.exists()


def test_plan_allocates_nothing(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("plan created a buffer")

    monkeypatch.setattr(Device, "create_buffer", refuse)
    options = flags(**SMALL, model=QWEN2, data=data)
    plan = json.loads(run("plan", "--json", *options).out)
    assert plan["peak"] == max(sum(plan["groups"].values()), plan["loading"])
    assert [bucket["tokens"] for bucket in plan["buckets"]] == [16, 32]
    assert plan["fits"]
    text = run("plan", *options).out
    assert f"({plan['optimizer_state']:,} bytes) of state" in text
    assert f"{plan['peak']:,}" in text
    assert "steps     2; 4 per epoch, 17 tokens each; cosine from 1.00e-03 after 1 step of warm-up\n" in text
    assert "warning   2 steps may be too few to learn much: try a larger --max-steps\n" in text
    tight = run("plan", *options, "--memory-budget", plan["peak"] - 1)
    assert tight.code == 0
    assert "it does not fit" in tight.out
    assert "would fit with --per-device-train-batch-size 1: " in tight.out
    ways = json.loads(run("plan", "--json", *options, "--memory-budget", plan["peak"] - 1).out)["ways"]
    assert {"--per-device-train-batch-size 1"} <= {way["options"] for way in ways}
    for way in ways:
        assert way["peak"] < plan["peak"]
        assert f"{way['options']}: " in tight.out
        assert f"({way['peak']:,} bytes)" in tight.out
        change = ["--gradient-checkpointing"] if "checkpointing" in way["options"] else way["options"].split()
        assert json.loads(run("plan", "--json", *options, *change).out)["peak"] == way["peak"]
    assert "it does not fit; the base model alone takes" in run("plan", *options, "--memory-budget", "1KB").out


def test_plan_of_a_shape(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch):
    """Without files. A delta net's five linear layers count as linear layers, of which two stay as they are."""
    monkeypatch.setattr(Device, "create_buffer", None)
    shape = ["--shape", "qwen3.5-0.8b", "--max-length", "256"]
    plan = json.loads(run("plan", "--json", *shape).out)
    delta = dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), 18)
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 6)
    assert plan["modules"] == {**delta, **attention, **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 24)}
    text = run("plan", *shape).out
    assert "weights in nf4, in_proj_b and in_proj_a in bf16" in text
    assert "modules   18 in_proj_qkv, 18 in_proj_z, " in text
    assert f"{plan['peak']:,}" in text
    assert "not known: choose one of" in run("plan", "--shape", "qwen").refusal()
    assert "--data and --shape exclude each other" in run("plan", *shape, "--data", data).refusal()
    assert "leave out --adapters" in run("plan", *shape, "--adapters", f"{data}:x").refusal()
    # It stands for the model and the data that a recipe names, but not for those that are given.
    recipe = ["--recipe", "persona-sft", "--shape", "qwen2.5-0.5b", "--max-length", "64"]
    assert "rank 64 on all-linear: 35,192,832 trained parameters" in run("plan", *recipe).out
    assert "--model and --shape exclude each other" in run("plan", *recipe, "--model", "demo").refusal()


def test_advice_leaves_out_what_the_device_cannot_bind():
    def replan(changes: Mapping[str, Any]) -> int:
        if "gradient_checkpointing" in changes:
            raise UserError("one tensor is too large")
        return 100 * changes.get("per_device_train_batch_size", 8)

    args = TrainingArguments(per_device_train_batch_size=8)
    with pytest.raises(UserError, match=r"is 350 bytes .* fit with per_device_train_batch_size=3 \(300 bytes\)\."):
        check_memory(800, 10, Budget(350, "test"), args, replan)
    with pytest.raises(UserError, match=r"even with .* it would need 100 bytes, so lower lora_r"):
        check_memory(800, 50, Budget(50, "test"), args, replan)
    with pytest.raises(UserError, match="the base model alone takes 51 bytes, so choose a smaller model"):
        check_memory(800, 51, Budget(50, "test"), args, replan)


# -- from end to end -------------------------------------------------------------------------------------------------


def test_a_small_run(run: Run, tmp_path: Path, data: Path, device: Device):
    out = tmp_path / "out"
    options = {**SMALL, "model": QWEN2, "data": data, "output": out, "eval_data": data, "learning_rate": 1e-2}
    planned = json.loads(run("plan", "--json", *flags(**options)).out)

    allocated_before = device.allocated  # by tests before this one
    result = run("finetune", *flags(**options))
    assert result.code == 0, result
    assert "the step limit is reached" in result.out
    facts = json.loads((out / "run.json").read_text())
    assert facts["memory"]["peak"] == facts["memory"]["peak_allocated"] - allocated_before == planned["peak"]

    base = json.loads(run("evaluate", "--json", "--model", QWEN2, "--data", data, "--max-length", 16).out)
    tuned = json.loads(run("evaluate", "--json", "--data", data, "--adapter", out, "--max-length", 16).out)
    assert tuned["loss"] == pytest.approx(facts["state"]["last_eval_loss"], rel=1e-5)
    assert tuned["loss"] < base["loss"]
    assert tuned["rows"] == 8

    assert "already holds a run" in run("finetune", *flags(**options)).refusal()
    changed = run("finetune", *flags(**{**options, "learning_rate": 1e-3}), "--resume").refusal()
    assert "--learning-rate was 0.01, not 0.001" in changed
    assert run("finetune", *flags(**options), "--resume").code == 0


def test_evaluate_takes_what_training_takes(run: Run, tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": list(range(1, 21))}])
    options = flags(model=QWEN2, data=data, max_length=16, enable_thinking=False)
    assert json.loads(run("evaluate", "--json", *options).out)["rows"] == 2
    assert json.loads(run("evaluate", "--json", *options, "--on-overflow", "drop").out)["rows"] == 1


def test_speed_is_that_of_training_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = import_module("wgpu_lora.cli.finetune")
    monkeypatch.setattr(command, "is_terminal", lambda stream: False)
    session = SimpleNamespace(model=SimpleNamespace(tensors_to_load=lambda: 1))
    run = SimpleNamespace(name=None, logs=lambda step, heldout: True)
    with command.TrainingProgress(SimpleNamespace(session=session, runs=[run])) as watcher:
        for step, (tokens, seconds) in enumerate([(100, 60.0), (200, 1.0), (100, 0.5), *[(100, 0.0)] * 9, (150, 1.0)]):
            counts = {"tokens": 0, "step_tokens": tokens, "step_processed_tokens": 2 * tokens}
            watcher.step(StepResult(step + 1, 99, 0.0, 1.0, 1e-3, 1.0, seconds=seconds, eval_loss=None, **counts))
    lines = capsys.readouterr().out.splitlines()
    assert "tokens/s" not in lines[0]  # it compiles
    assert lines[1].endswith(" 200 trained, 400 processed tokens/s")  # no estimate from one step
    assert lines[2].endswith(" 200 trained, 400 processed tokens/s  1:12 min left")
    assert " 1,050 trained, 2,100 processed tokens/s  " in lines[-1]  # of the last ten steps
    assert command.training_steps([(0, 0.1), (5, 2.0), (5, 4.0)]) == [2.0, 4.0]  # which the time left is of
    assert command.training_steps([(0, 0.1)]) == [0.1]


def test_a_run_that_is_not_finite_fails(run: Run, tmp_path: Path, data: Path):
    out = tmp_path / "out"
    options = {**SMALL, "max_steps": 4, "lr_scheduler_type": "constant", "learning_rate": 1e38}
    result = run("finetune", *flags(**options, model=QWEN2, data=data, output=out))
    assert result.code == 1, result
    assert "not finite" in result.err
    assert len(result.err.splitlines()) == 1
    assert all(np.abs(values).max() < 2**20 for values in load_file(out / "adapter_model.safetensors").values())
