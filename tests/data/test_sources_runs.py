"""Runs on rows from Python equal those on a file; bad rows are set aside; both resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.cli import QWEN2, ROWS, SMALL, flags, write_rows

import wgpu_lora
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli import main
from wgpu_lora.data.row_counts import SKIPPED

WEIGHTS = "adapter_model.safetensors"


def same(one: Path, other: Path) -> bool:
    left, right = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def test_rows_from_python_train_as_a_file_does(tmp_path: Path) -> None:
    file, rows = write_rows(tmp_path / "rows.jsonl"), ROWS
    model = wgpu_lora.load(QWEN2)

    def train(data: Any, name: str, **options: Any) -> wgpu_lora.RunRecord:
        return wgpu_lora.finetune(model, data=data, output=tmp_path / name, **{**SMALL, "save_steps": 1, **options})

    train(file, "file", eval_data=file)
    record = train(rows, "rows", eval_data=iter(rows))
    assert same(tmp_path / "file", tmp_path / "rows")
    assert record.eval_data is not None
    assert record.data.path == record.eval_data.path == f"{len(rows)} rows from Python"
    assert record.options.data == "rows from Python"
    losses = [wgpu_lora.evaluate(model, data, max_length=16) for data in (file, rows)]
    assert losses[0].loss == losses[1].loss
    assert losses[1].data.startswith(f"rows from Python: {len(rows)} examples")

    (tmp_path / "rows" / "run.json").unlink()
    for extra in (tmp_path / "rows" / "checkpoints").glob("step-2"):
        extra.rename(tmp_path / "last")
    with pytest.raises(wgpu_lora.UserError, match=rf"The rows of {len(rows) - 1} rows from Python have changed since"):
        train(rows[1:], "rows", eval_data=rows, resume=True)
    train(file, "rows", eval_data=file, resume=True)
    assert same(tmp_path / "file", tmp_path / "rows")

    tasks = [{"data": rows, "checkpoint": tmp_path / "a"}, {"data": file, "checkpoint": tmp_path / "b"}]
    job = MultiAdapterPipeline(tasks, model, output=str(tmp_path / "both"), eval_data=rows, **SMALL).job
    digests = [run.stream.rows_digest() for run in job.runs]
    assert digests[0] == digests[1]
    assert [run.heldout.path for run in job.runs if run.heldout] == [f"{len(rows)} rows from Python"] * 2


def test_bad_rows_are_set_aside_in_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ['{"input_ids": [1, "2"]}', *ROWS, "{}", "[1]"])
    command = ["finetune", *flags(model=QWEN2, data=file, output=tmp_path / "out", **SMALL | {"max_steps": 1})]
    assert main(command) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"wgpu-lora: {file} has 3 rows that cannot be used; fix them")
    assert told[1].startswith("  line 1: 'input_ids' must be a list of integers")
    assert len(told) == 4
    assert not (tmp_path / "out").exists()
    assert main([*command, "--skip-bad-rows"]) == 0
    shown = capsys.readouterr().out
    assert "3 bad rows skipped (lines 1, " in shown
    assert f"bad rows will be listed in {tmp_path / 'out' / SKIPPED}" in shown
    aside = [json.loads(line) for line in (tmp_path / "out" / SKIPPED).read_text().splitlines()]
    assert [row["content"] for row in aside] == [{"input_ids": [1, "2"]}, {}, [1]]
    assert main(["evaluate", "--model", QWEN2, "--data", str(file), "--max-length", "16", "--skip-bad-rows"]) == 0
    assert "3 bad rows skipped" in capsys.readouterr().out
