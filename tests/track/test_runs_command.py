"""Every finetune, evaluation and benchmark is in the run log, and `wgpu-lora runs` shows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.cli import QWEN2, ROWS, SMALL, flags, write_rows

import wgpu_lora
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.train.run.run_tracking import FILE
from wgpu_lora.train.track.run_log import RunLog


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    return RunLog()


def test_runs(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_run / "data", tmp_path / "copy")
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "copy"))
    log, output = RunLog(), finished_run / "run"
    evaluated = {"data": finished_run / "heldout.jsonl", "adapter": output, "max_length": 16}
    assert main(["evaluate", *flags(**evaluated, goal="check", notes="hf_abcdefghijkl")]) == 0
    assert main(["evaluate", *flags(**evaluated, run_log=False)]) == 0
    tuned, measured = log.read().entries
    assert "hf_abc" not in log.path.read_text()
    assert (tuned.kind, tuned.name, tuned.status, tuned.steps, tuned.losses.of) == (
        "finetune", "qwen2_nf4_lora_sft_f32", "finished", 7, "held-out",
    )  # fmt: skip
    assert tuned.id == json.loads((output / FILE).read_text())["id"]
    state = wgpu_lora.RunRecord.read(output).state
    values = (tuned.losses.initial, tuned.losses.best, tuned.losses.final, tuned.tokens)
    assert values == (state.first_eval_loss, state.best_eval_loss, state.last_eval_loss, state.tokens)
    assert tuned.outputs == [str(output), str(output / "best")]
    assert tuned.config["data"] == tuned.data.path == str(finished_run / "rows.jsonl")
    assert (measured.kind, measured.goal, measured.status) == ("evaluate", "check", "finished")
    assert measured.losses.final == pytest.approx(state.last_eval_loss, rel=1e-5)
    capsys.readouterr()
    assert main(["runs", "--kind", "finetune", "--status", "finished"]) == 0
    shown = capsys.readouterr().out
    assert ("nf4_lora_sft_f32" in shown, "evaluate" in shown) == (True, False)
    assert main(["runs", "--json"]) == 0
    assert [run["status"] for run in json.loads(capsys.readouterr().out)] == ["finished", "finished"]
    assert main(["runs", "--markdown"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["runs", tuned.id, "last", "--markdown"]) == 0
    assert "| goal | - | check |" in capsys.readouterr().out
    for wrong in (["x"], ["last"] * 3, ["last", "--kind", "bench"], ["--status", "done"], ["--since", "x"]):
        assert main(["runs", *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_pipeline_has_an_entry_for_each_adapter(
    finished_multi_adapter_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(finished_multi_adapter_run / "data"))
    entries = RunLog().read().entries
    assert [(entry.adapter, entry.status) for entry in entries] == [(name, "finished") for name in "abc"]
    assert {entry.pipeline for entry in entries} == {str(finished_multi_adapter_run / "run" / "pipeline")}


def test_a_run_that_fails_or_is_stopped(log: RunLog, tmp_path: Path) -> None:
    def train(name: str, **changes: Any) -> wgpu_lora.RunRecord:
        arguments = {**SMALL, "data": rows, "progress_bar": False, "output": str(tmp_path / name), **changes}
        return wgpu_lora.finetune(QWEN2, **arguments)

    rows = str(write_rows(tmp_path / "rows.jsonl", ROWS))
    record = train("run", logging_steps=9, callback=lambda result: True)
    train("third", learning_rate=1e38, max_steps=4)
    with pytest.raises(UserError):
        train("other", callback=Mock(side_effect=UserError("no more")))
    stopped, diverged, failed = log.read().entries
    assert (stopped.status, stopped.losses.of, stopped.losses.final) == ("stopped", "training", record.loss)
    assert (diverged.status, bool(diverged.error)) == ("failed", True)
    assert (failed.status, failed.error) == ("failed", "no more")
