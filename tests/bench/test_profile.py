"""Profiling a step: what the parts add up to, the trace file, and the command around both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import FIXTURES
from support.bench import MINI_ROW
from support.cli import QWEN2, Run, commands, flags

from wgpu_lora.bench.step_profile import Piece, Profile, profile_step, trained_sizes, write_trace
from wgpu_lora.bench.training_step import TrainingStep, chosen_model
from wgpu_lora.cli.bench.profile import _idle_time
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.models import published_shapes
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.records import RunRecord

STEP = flags(shape="mini", layers=1, tokens=16, batch=2, rank=4, rounds=1)


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(published_shapes._ROWS, "mini", MINI_ROW)
    return "mini"


@pytest.fixture
def run(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: device)
    return commands(capsys, "profile")


def sample_profile() -> Profile:
    def piece(kernel: str, shape: str, seconds: float, operations: int | None) -> Piece:
        return Piece("train", kernel, shape, (1, 1, 1), seconds, operations)

    pieces = [
        piece("norm", "rows 4", 0.1, None),
        piece("product", "m 4", 0.25, 10**9),
        piece("product", "m 8", 0.5, 2 * 10**9),
    ]
    return Profile("timestamps", 1, step_seconds=1.0, device_seconds=0.9, pieces=pieces)


def test_shares_are_of_all_kernels():
    profile = sample_profile()
    assert profile.attributed_share == pytest.approx(0.85)
    assert profile.host_share == pytest.approx(0.1)
    product, norm = profile.groups()
    assert (product.kernel, product.shape, product.calls) == ("product", None, 2)
    assert product.share == pytest.approx(0.75 / 0.85)
    assert product.gflops == pytest.approx(4.0)
    assert norm.gflops is None
    assert sum(group.share for group in profile.groups()) == pytest.approx(1)
    shapes = [(group.kernel, group.shape, group.calls) for group in profile.groups(by_shape=True)]
    assert shapes == [("product", "m 8", 1), ("product", "m 4", 1), ("norm", "rows 4", 1)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "100 ms, 10.0% of the step"),
        ({"device_seconds": 1.05}, "too little to measure"),  # three measurements: one need not fit into another
        ({"step_spread": 0.2}, "too little to measure"),
        ({"clock": "host"}, "not known"),  # it counts waiting as computing
    ],
)
def test_what_cannot_be_told_is_not_a_figure(changes: dict[str, Any], text: str):
    profile = replace(sample_profile(), **changes)
    assert _idle_time(profile).startswith(text)
    assert (profile.host_share is None) == bool(changes)
    assert profile.as_dict()["host_share"] == profile.host_share


def test_trace_lays_dispatches_end_to_end(tmp_path: Path):
    write_trace(tmp_path / "trace.json", sample_profile(), "a step")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    expected = [(0, 1e5), (1e5, 2.5e5), (3.5e5, 5e5)]
    assert complete == [(pytest.approx(start), pytest.approx(length)) for start, length in expected]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["train"]


def test_every_dispatch_of_the_step_is_timed(device: Device, mini: str):
    model = chosen_model(None, mini, 1, device)
    step = TrainingStep(model, TrainingArguments(per_device_train_batch_size=2, max_length=16, lora_r=4))
    try:
        step.allocate()
        profile = profile_step(step, rounds=1)
    finally:
        step.close()
    [batch] = step.session.steps.values()
    dispatches = [*batch.program.dispatches, *step.session.optimizer.program.dispatches]
    assert [piece.kernel for piece in profile.pieces] == [d.kernel.name for d in dispatches]
    assert all(piece.seconds > 0 for piece in profile.pieces)
    first = next(piece for piece in profile.pieces if piece.kernel == "nf4_matmul")
    assert first.shape.startswith("m 32, n 64, k 64")
    assert first.operations == 2 * 32 * 64 * 64


def test_command_writes_json_and_trace(run: Run, mini: str, tmp_path: Path):
    trace = tmp_path / "trace.json"
    code, out, _ = run(*STEP, "--json", "--trace", trace)
    report = json.loads(out)
    assert code == 0
    assert report["schema"] == "wgpu-lora-profile/1"
    assert report["work"]["layers"] == 1
    calls = sum(kernel["calls"] for kernel in report["kernels"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert calls == sum(event["ph"] == "X" for event in events) > 20
    assert report["attributed_seconds"] == pytest.approx(sum(kernel["seconds"] for kernel in report["kernels"]))


@pytest.fixture
def finished(tmp_path: Path, device: Device) -> Path:
    """What a run of the fixture qwen2 leaves, as far as a profile reads it."""
    options = {"model": QWEN2, "base_dtype": "bf16", "lora_r": 3, "max_length": 24, "per_device_train_batch_size": 3}
    options |= {"gradient_checkpointing": True, "target_modules": "q_proj,v_proj"}
    facts = json.loads((FIXTURES / "runs/expected/single/run.json").read_text())
    facts |= {"options": options, "state": {"tiles": {"a kernel": Tiling(rows=2).to_json()}}}
    facts["environment"]["device"]["name"] = device.info.name
    (tmp_path / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_of_a_run_it_takes_the_runs_options(run: Run, finished: Path, device: Device):
    code, out, err = run("--run", str(finished), "--rounds", "1", "--batch", "2", "--json")
    assert code == 0, err
    report = json.loads(out)
    digest = report["work"].pop("base_digest")
    assert report["work"] == {
        "model": QWEN2,
        "layers": 3,
        "whole": True,
        "base_dtype": "bf16",
        "batch": 2,  # of the command line, which wins
        "tokens": 24,
        "rank": 3,
        "gradient_checkpointing": True,
        "target_modules": "q_proj,v_proj",
        "compute_dtype": "f32",
        "tiles": "of the run",
    }
    assert digest == Checkpoint(QWEN2).digest()  # what run.json has, so that a report can compare
    assert {"name", "driver"} <= report["device"].keys()


def test_rows_that_were_not_packed_have_their_average_length(finished: Path):
    facts = json.loads((finished / "run.json").read_text())
    facts["options"] |= {"packing": False, "gradient_accumulation_steps": 2}
    facts["state"] |= {"step": 5, "processed_tokens": 5 * 2 * 3 * 7 + 1}
    (finished / "run.json").write_text(json.dumps(facts))
    assert trained_sizes(RunRecord.read(finished)) == (3, 8)


def test_of_a_run_that_cannot_be_read(run: Run, finished: Path):
    (finished / "run.json").write_text('{"options": {}}')
    for words, message in (
        (["--run", finished, "--shape", "qwen3-8b"], "--run and --shape are both given"),
        (["--run", finished], "cannot be read: 'stop_reason' is missing"),
        (["--run", finished / "none"], "has no finished run"),
    ):
        code, out, err = run(*words)
        assert (code, out, message in err) == (2, "", True)


def test_command_prints_a_table(run: Run, mini: str):
    code, out, _ = run(*STEP, "--by-shape")
    assert code == 0
    for text in ("nf4_matmul_backward", "m 32, n 64, k 64", "each call timed alone by ", " processed tokens/s"):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "zork"], "The shape zork is not known: choose one of qwen2.5-0.5b, "),
        (["--shape", "mini", "--model", "demo"], "--model and --shape are both given"),
        (["--shape", "mini", "--layers", "9"], "--layers 9 is not possible: this model has 3 layers."),
        (["--shape", "mini", "--tokens", "65"], "--tokens 65 is not possible: mini supports rows of up to 64 tokens."),
        (
            ["--shape", "mini", "--base-dtype", "int3"],
            "--base-dtype must be one of auto, nf4, bf16, f16, f32, lut2, lut3, lut4, int8, gguf, not int3.",
        ),
        (["--shape", "mini", "--rank", "0"], "--rank must be greater than 0, not 0."),
        (["--shape", "mini", "--tokens", "64", "--batch", "9999999"], "lower --batch or --tokens."),
        (["--rounds", "0"], "--rounds must be at least 1, not 0."),
        (["--trace", "/nowhere/trace.json"], "The directory /nowhere of --trace does not exist"),
    ],
)
def test_mistakes_are_one_line(run: Run, mini: str, arguments: list[str], message: str):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line
