"""`wgpu-lora finetune --adapters` as a person meets it: what it prints, draws, refuses and leaves behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import Result, Run
from support.training.training import model_dir, random_rows

from wgpu_lora.cli.finetune import TrainingProgress
from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.gpu.device_list import choose
from wgpu_lora.gpu.memory_leases import Ledger, device_key
from wgpu_lora.gpu.memory_leases.lease_queue import take
from wgpu_lora.train.adapter_tasks import task_of_pair
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_multi_adapter_job

COMMON = ["--lora-r", "4", "--max-length", "16", "--no-packing", "--save-steps", "0", "--logging-steps", "1"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two data files in the directory that the command runs in."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        random_rows(tmp_path / f"{name}.jsonl", 6, 301, seed)
    return tmp_path


Finetune = Callable[..., Result]


@pytest.fixture
def finetune(rows: Path, run: Run) -> Finetune:
    pairs = ["--adapters", "a.jsonl:out/a", "--adapters", "b.jsonl:out/b"]
    where = ["--model", model_dir("qwen2"), "--output", "out/both"]
    return lambda *more, steps=2: run("finetune", *where, *pairs, *COMMON, "--max-steps", steps, *more)


@pytest.mark.usefixtures("fresh_device")
def test_it_trains_and_says_so(rows: Path, finetune: Finetune) -> None:
    lines = finetune("--eval-data", "a.jsonl").output().splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("step ")] == [
        ["step", name, f"{step}/2"] for step in (1, 2) for name in "ab"
    ]
    ended = [line for line in lines if line.startswith("finished")]
    assert all(f"{name}: 2 of 2 steps in " in line for name, line in zip("ab", ended, strict=True))
    assert (rows / "out/both/losses.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((rows / "out/both/pipeline.json").read_text())
    assert [a["checkpoint"] for a in record["adapters"]] == ["out/a", "out/b"]
    assert record["memory"]["peak"] == record["memory"]["peak_allocated"]
    for name in "ab":
        for file in ("adapter_config.json", "run.json", "README.md", "log.jsonl", "best/metadata.json"):
            assert (rows / "out" / name / file).is_file()
    assert "already belongs to a pipeline" in finetune().refusal()  # what is there is not written over


def test_a_poisoned_adapter_is_exit_code_1(rows: Path, finetune: Finetune) -> None:
    text = '[[adapter]]\ndata = "b.jsonl"\ncheckpoint = "out/c"\nlearning_rate = 1e30\n'
    (rows / "more.toml").write_text(text)
    code, out, err = finetune("--adapters-config", "more.toml", steps=4)
    assert "wgpu-lora: adapter c: the update would have left weights not finite" in err
    assert (code, out.count("the step limit is reached")) == (1, 2)
    step = json.loads((rows / "out/both/pipeline.json").read_text())["step"]
    assert finetune("--adapters-config", "more.toml", "--resume", steps=4).code == 1  # it is not tried again
    assert json.loads((rows / "out/both/pipeline.json").read_text())["step"] == step


def test_memory_that_is_held(rows: Path, finetune: Finetune) -> None:
    """Refused where others hold the budget; it trains once that is free."""
    budget = ["--memory-budget", "1GiB"]
    with take(Ledger(device_key(choose(None)[0])), (1 << 30) - 4096, None, "somebody's run"):
        first, second = finetune(*budget).refusal(), finetune(*budget, "--wait", "0.5")
    assert "somebody's run" in first
    assert "queue for it with --wait" in first
    assert second.refusal().startswith("wgpu-lora: After 0.5 s of waiting")
    assert "waiting   place 1 in the queue" in second.out
    assert not (rows / "out/a").exists()
    finetune(*budget, "--wait").output()


def test_a_budget_that_is_too_small(rows: Path, finetune: Finetune) -> None:
    """The way out that is named is one, to the byte."""
    assert "but the budget is 976.6 KiB (--memory-budget)" in finetune("--memory-budget", "1MB").refusal()
    args = TrainingArguments(model=str(model_dir("qwen2")), max_length=16, packing=False)
    tasks = [task_of_pair("a.jsonl:out/a"), task_of_pair("b.jsonl:out/b")]
    peak = prepare_multi_adapter_job(args, tasks).session.memory().peak
    job = prepare_multi_adapter_job(replace(args, memory_budget=str(peak - 1)), tasks)
    with pytest.raises(UserError, match=r"it would fit with gradient_checkpointing=True \([\d,]+ bytes\)") as refusal:
        job.check_memory()
    nbytes = int(str(refusal.value).split("checkpointing=True (")[1].split(" bytes")[0].replace(",", ""))
    assert job.replan({"gradient_checkpointing": True}) == nbytes < peak


def test_the_table(rows: Path) -> None:
    from rich.console import Console

    args = TrainingArguments(model=str(model_dir("qwen2")), max_length=16, packing=False)
    job = prepare_multi_adapter_job(args, [task_of_pair("a.jsonl:out/a"), task_of_pair("b.jsonl:out/b")])
    table = TrainingProgress(job)

    def result(step: int, **more: Any) -> StepResult:
        values: dict[str, Any] = {"epoch": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0, "seconds": 0.5} | more
        return StepResult(
            step, 4, loss=1.25, tokens=80, adapter="a", step_tokens=20, step_processed_tokens=30, **values
        )

    table.step(result(1, eval_loss=2.5))
    table.step(result(2, eval_loss=None))
    stream = io.StringIO()
    Console(file=stream, width=120).print(table.table())
    header, first, second, below = stream.getvalue().splitlines()
    assert header.split()[:6] == ["adapter", "step", "epoch", "loss", "held-out", "trained"]
    assert first.split() == ["a", "2/4", "0.50", "1.2500", "2.5000", "80", "40", "60", "100%", "▁▁"]
    assert second.split() == ["b", "0", "0%"]
    assert below.strip() == f"{format_bytes(job.session.device.allocated)} on the device"
    table.logged({"gpu_power": 203.4}, "a")
    table.step(result(3, eval_loss=None))
    for step in (1, 2, 3):  # the first includes compilation, so that one alone is no estimate
        table.step(replace(result(step, eval_loss=None, seconds=1.5), adapter="b"))
    assert table.table().caption.startswith("2 s left, ")  # a step of 0.5 s and one of 1.5 s
    assert table.table().caption.endswith(", 203 W")


def test_interrupt_keeps_everything(rows: Path, monkeypatch: pytest.MonkeyPatch, finetune: Finetune, run: Run) -> None:
    """Ctrl-C ends the step in progress for all adapters, and --resume finishes them."""
    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        code, printed, _ = finetune(steps=3)
    assert code == 130
    assert len(re.findall(r"^interrupted [ab]: 1 of 3 steps", printed, re.MULTILINE)) == 2
    assert f"finetune --output {Path('out/both')} --resume" in printed
    ended = [
        line
        for line in run("finetune", "--output", "out/both", "--resume").output().splitlines()
        if line.startswith("step ")
    ]
    assert [line.split()[1:3] for line in ended] == [[name, f"{step}/3"] for step in (2, 3) for name in "ab"]
    for name in "ab":
        assert json.loads((rows / "out" / name / "run.json").read_text())["stop_reason"] == "max steps"
