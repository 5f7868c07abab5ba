"""Requests to jobs that train: stop, end, and the end of the input."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, write_rows
from support.events import hearing

from wgpu_lora.cluster.worker.job_process import ORPHANED, EventWriter, TrainingRequests
from wgpu_lora.cluster.worker.worker import Event, Worker
from wgpu_lora.errors import UserError
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.records import PipelineRecord, RunRecord

ENDLESS = {**SMALL, "model": QWEN2, "max_steps": 10**6, "tune": False, "requests": True}
INTERRUPTED = 143 if sys.platform != "win32" else 130


def pipeline(root: Path, rows: str, **more: Any) -> dict[str, Any]:
    adapters = [
        {"name": name, "checkpoint": str(root / "adapters" / name), "data": rows, "lora_r": rank}
        for name, rank in (("a", 4), ("b", 2))
    ]
    return {**ENDLESS, "save_steps": 2, "adapters": adapters, "output": str(root / "pipeline"), **more}


def until(worker: Worker, event: str, **facts: Any) -> list[Event]:
    """The worker's events up to one of this kind, with these values."""
    events = []
    for current in worker.events():
        events.append(current)
        if current["event"] == event and facts.items() <= current.items():
            return events
    raise AssertionError(worker.failure_reason())


def test_an_adapter_ends_alone_and_stays_ended_elsewhere(tmp_path: Path) -> None:
    rows, first, second = str(write_rows(tmp_path / "rows.jsonl")), tmp_path / "first", tmp_path / "second"
    with Worker("pipeline", pipeline(first, rows), interactive=True, timeout=300) as worker:
        until(worker, "step", adapter="a", step=2)
        worker.request("end", adapter="z")
        worker.request("end", adapter="a")
        first_events = until(worker, "retired", adapter="a", reason="request")
        answers = [event for event in first_events if event["event"] == "answer"]
        assert answers[0]["refused"] == "There is no adapter 'z' to end: choose one of a and b."
        assert (answers[1]["request"], answers[1]["adapter"]) == ("end", "a")
        ended = RunRecord.read(first / "adapters" / "a")
        assert (ended.stop_reason, ended.outcome) == ("request", "stopped early")
        until(worker, "step", adapter="b", step=ended.state.step + 2)  # the other goes on
        worker.request("stop")
        assert worker.wait() == INTERRUPTED, worker.failure_reason()
        record = PipelineRecord.from_json(worker.last["result"])
    assert [adapter.stop_reason for adapter in record.adapters] == ["request", "interrupt"]
    assert record.adapters[0].step == ended.state.step
    step = record.adapters[1].step
    state = read_multi_adapter_state(first / "pipeline")
    assert (state.steps, state.ended) == ({"a": ended.state.step, "b": step}, {"a": "request"})

    shutil.move(first, second)  # resumed on another machine
    options = pipeline(second, rows, resume=True, max_steps=step + 2)
    with Worker("pipeline", options, interactive=True, timeout=300) as worker:
        events = list(worker.events())
        record = PipelineRecord.from_json(worker.result())
    steps = [(event["adapter"], event["step"]) for event in events if event["event"] == "step"]
    assert steps == [("b", step + 1), ("b", step + 2)]
    assert {event["adapter"]: event["reason"] for event in events if event["event"] == "retired"} == {
        "a": "request",
        "b": "max steps",
    }
    assert record.adapters[0].adapter_sha256 == ended.adapter_sha256


def test_a_single_run_ends_with_its_results_or_dies_with_its_parent(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl"))
    options = {**ENDLESS, "data": rows, "output": str(tmp_path / "out")}
    with Worker("finetune", options, interactive=True, timeout=300) as worker:
        until(worker, "step")
        worker.request("end", adapter="any")
        record = RunRecord.from_json(worker.result())
    assert (record.stop_reason, worker.process.returncode) == ("request", 0)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()

    with Worker("finetune", {**options, "output": str(tmp_path / "orphan")}, interactive=True, timeout=300) as worker:
        until(worker, "step")
        assert worker.process.stdin
        worker.process.stdin.close()
        assert worker.wait() == ORPHANED
    assert not (tmp_path / "orphan" / "run.json").exists()


def trained(args: TrainingArguments, end_at: int | None = None) -> RunRecord:
    """A run that is asked to end while this step is counted, before the first if 0; never if None."""
    job = prepare_job(args)

    def logged(line: dict[str, Any], adapter: str | None) -> None:
        if line["step"] == end_at:
            job.requests.end(None)

    if end_at == 0:
        job.requests.end(None)
    return job.train(hearing(logged=logged))


def test_what_has_been_trained_does_not_depend_on_requests(tmp_path: Path) -> None:
    """Ended before the first step, after a checkpoint, and in the last step; then resumed to the end."""
    options = {**SMALL, "model": QWEN2, "max_steps": 4, "tune": False, "save_steps": 2, "lora_dropout": 0.1}
    options |= {"data": str(write_rows(tmp_path / "rows.jsonl")), "validation_split": 0.3, "eval_steps": 2}
    whole = trained(from_values({**options, "output": str(tmp_path / "whole")}, "the test"))
    for step, reason in ((0, "request"), (2, "request"), (4, "max steps")):
        args = from_values({**options, "output": str(tmp_path / str(step))}, "the test")
        ended = trained(args, step)
        assert (ended.stop_reason, ended.steps) == (reason, step)
        if not step:
            with pytest.raises(UserError, match="resume"):
                trained(replace(args, resume=True))
            continue
        resumed = trained(replace(args, resume=True)) if step == 2 else ended
        assert resumed.adapter_sha256 == whole.adapter_sha256
        assert resumed.state.best_eval_loss == whole.state.best_eval_loss


@pytest.mark.slow
def test_a_stop_before_training_ends_the_job(tmp_path: Path) -> None:
    options = {**ENDLESS, "data": str(write_rows(tmp_path / "rows.jsonl")), "output": str(tmp_path / "out")}
    with Worker("finetune", options, interactive=True, timeout=300) as worker:
        until(worker, "begin")
        worker.request("stop")
        assert worker.wait() == INTERRUPTED
        stopped = worker.last.get("kind") or worker.last["result"]["stop_reason"]
        assert stopped in ("KeyboardInterrupt", "interrupt")


def test_an_unreadable_request_is_answered_and_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    out, requests = io.StringIO(), TrainingRequests()
    EventWriter(out, io.StringIO('zork\n{"request": "side"}\n{"request": "end"}\n')).listen(requests.side())
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [ORPHANED]  # the input has ended
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ["refused" in answer for answer in answers] == [True, True, False]
    assert "is not known: choose one of end, stop." in answers[1]["refused"]
    assert requests.ending(None)


def test_requests_need_an_input_of_their_own() -> None:
    with pytest.raises(UserError, match="standard input, where this job is: give it in a file"):
        EventWriter(io.StringIO()).listen(TrainingRequests().side())
