"""Default row lengths: they fit the model or, for evaluation of an adapter, equal those of its training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, commands, flags, write_rows

import wgpu_lora
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.trained_options import evaluation_rows

POSITIONS = 128  # of the models among the fixtures


def test_a_length_that_nobody_gave(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It fits the model, also in the record and in resumed runs; an adapter is evaluated as it was trained."""
    run = commands(capsys)
    data, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    small = {name: value for name, value in SMALL.items() if name != "max_length"} | {"tune": False}
    said = run("finetune", *flags(**small, model=QWEN2, data=data, output=out, eval_steps=1)).output()
    assert f"length    rows of at most {POSITIONS} tokens, the number of positions of this model" in said
    assert (
        "note      --eval-steps 1 does nothing, since no rows are held out (use --eval-data or --validation-split)"
        in said
    )
    options = json.loads((out / "run.json").read_text())["options"]
    assert (options["max_length"], options["warmup_steps"]) == (POSITIONS, 0)
    assert run("finetune", "--output", out, "--resume", "--max-steps", 3)[0] == 0
    assert (
        f"--max-length was {POSITIONS}, not 64"
        in run("finetune", "--output", out, "--resume", "--max-steps", 4, "--max-length", 64).refusal()
    )
    options |= {"max_length": 8, "on_overflow": "drop"}
    (out / "run.json").write_text(json.dumps({"options": options}))
    said = run("evaluate", "--model", QWEN2, "--data", data, "--adapter", out)[1]
    assert "note      --max-length 8, --on-overflow drop, as in training" in said
    model = wgpu_lora.load(QWEN2)
    assert wgpu_lora.evaluate(model, data, adapter=out, on_overflow="truncate").rows == 8
    assert wgpu_lora.evaluate(model, data).max_length == POSITIONS
    with pytest.raises(UserError, match=rf"^max_length=129 is more than this model's {POSITIONS} positions"):
        wgpu_lora.evaluate(model, data, max_length=POSITIONS + 1)


def test_a_pipeline_and_a_benchmark_fit_their_model(device: Device, tmp_path: Path) -> None:
    model = wgpu_lora.load(QWEN2)
    data = write_rows(tmp_path / "rows.jsonl")
    tasks = [{"data": data, "checkpoint": tmp_path / name} for name in "ab"]
    job = wgpu_lora.MultiAdapterPipeline(tasks, model, max_iters=1).job
    assert {run.args.max_length for run in job.runs} == {job.args.max_length} == {POSITIONS}
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'model = "{QWEN2}"\ndata = "{data}"\noutput = "{tmp_path / "out"}"\n')
    assert prepare_job(*prepared(Work(str(recipe)), tmp_path, device)).run.args.max_length == POSITIONS


@pytest.mark.parametrize("on_overflow", ["truncate", "drop"])
def test_a_plan_of_shorter_rows_is_that_of_the_run(tmp_path: Path, on_overflow: str) -> None:
    """The advice about a smaller --max-length is exact to the byte."""
    data, model = write_rows(tmp_path / "rows.jsonl"), wgpu_lora.load(QWEN2)
    args = TrainingArguments(model=QWEN2, data=str(data), eval_data=str(data), on_overflow=on_overflow, lora_r=2)
    least = {"per_device_train_batch_size": 1, "max_length": 8}
    planned = prepare_job(args, model, planning=True).replan(least)
    assert planned == prepare_job(replace(args, **least), model, planning=True).session.memory().peak
    with pytest.raises(UserError, match=r"^max_length=2 leaves no row"):
        prepare_job(replace(args, on_overflow="drop"), model, planning=True).replan({"max_length": 2})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, 1024),
        ({"max_length": 100}, 100),
        ({"max_length": 4096}, 1024),
        ({"max_length": True}, 1024),
        ({"max_length": -5}, 1024),
        ({"max_length": "8"}, 1024),
        ("[]", 1024),
        ("{", 1024),
    ],
    ids=str,
)
def test_an_adapters_record_is_not_taken_on_trust(tmp_path: Path, options: Any, expected: int) -> None:
    if options is not None:
        text = options if isinstance(options, str) else json.dumps({"options": options})
        (tmp_path / "run.json").write_text(text)
    assert evaluation_rows({}, [tmp_path], 2048).max_length == expected
    assert evaluation_rows({}, [tmp_path], 100).note.startswith("rows of at most 100 tokens" if expected > 100 else "")


def test_adapters_that_are_measured_together_share_their_rows(tmp_path: Path) -> None:
    for name, options in (
        ("a", {"max_length": 64, "completion_only_loss": False, "on_overflow": "drop"}),
        ("b", {"max_length": 256, "completion_only_loss": False, "on_overflow": "truncate"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text(json.dumps({"options": options}))  # as checkpoints have it
    rows = evaluation_rows({}, [tmp_path / "a", tmp_path / "b"], 2048)
    assert (rows.max_length, rows.completion_only_loss, rows.on_overflow) == (256, False, "truncate")
    assert rows.note == "max_length=256, completion_only_loss=False, as in training"
    assert evaluation_rows({"max_length": 32}, [tmp_path / "a"], 2048).max_length == 32
    assert evaluation_rows({}, [tmp_path / "a", tmp_path / "c"], 2048).max_length == 1024  # one says nothing
