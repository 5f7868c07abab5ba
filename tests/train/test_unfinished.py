"""Runs that were killed: saved by time as well, resumed from their newest state, begun over only on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.events import hearing
from support.training import model_dir, random_rows

from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.loop import trainer
from wgpu_lora.train.loop.slot_progress import CHECKPOINT
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.pipeline_state import read_pipeline_state
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.train.run.training_log import LOG, read_log

NEVER: dict[str, Any] = {"save_steps": 0, "save_minutes": 0.0}
EVERY: dict[str, Any] = {"save_steps": 0, "save_minutes": 10.0}


class Killed(Exception):
    """Ends a run as a kill does: nothing more is saved."""


def killed_after(step: int) -> Callable[[StepResult], None]:
    def callback(result: StepResult) -> None:
        if result.step == step:
            raise Killed

    return callback


@pytest.fixture(scope="module")
def model(device: Device) -> LoadedModel:
    return open_model(str(model_dir("qwen2")), device, "nf4")


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes twenty minutes, by the clock that tells when to save."""
    passed = count(20 * 60, 20 * 60)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(passed), perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer, "time", clock)


def options(tmp_path: Path, name: str = "run", heldout: bool = True, **changes: Any) -> dict[str, Any]:
    for file, rows in (("rows", 12), ("heldout", 3)):
        if not (tmp_path / f"{file}.jsonl").exists():
            random_rows(tmp_path / f"{file}.jsonl", rows, 301, rows)
    return {
        "data": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / name), "lora_r": 4, "lora_dropout": 0.1,
        "eval_data": str(tmp_path / "heldout.jsonl") if heldout else None, "eval_steps": 2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 16, "packing": False,
        "max_steps": 7, "logging_steps": 3, "learning_rate": 1e-3, **NEVER, **changes,
    }  # fmt: skip


def result(run: Path) -> tuple[bytes, list[dict[str, float]]]:
    """The adapter and the log of a run, without times."""
    log = [{k: v for k, v in line.items() if "second" not in k} for line in read_log(run / LOG)]
    return (run / "adapter_model.safetensors").read_bytes(), log


@pytest.mark.parametrize(
    ("changes", "newest"),
    [
        ({}, "best"),
        ({"save_steps": 3}, "best"),  # of step 4, and a checkpoint of step 3
        ({"save_steps": 4}, "step-4"),  # best/ is of the same step
        ({"heldout": False, **EVERY}, "step-4"),
    ],
)
def test_the_newest_complete_state_is_resumed(
    model: LoadedModel, tmp_path: Path, changes: dict[str, Any], newest: str
) -> None:
    given = options(tmp_path, **changes)
    with pytest.raises(Killed):
        api.finetune(model, callback=killed_after(5), **given)
    found = run_checkpoint.latest_checkpoint(tmp_path / "run")
    assert found
    assert (found.name, read_state(found)[0].step) == (newest, 4)
    with pytest.raises(UserError, match=r"already holds a run: continue it with resume=True, begin over with overwr"):
        api.finetune(model, **given)
    api.finetune(model, resume=True, output=given["output"])
    api.finetune(model, **options(tmp_path, "whole", heldout=changes.get("heldout", True)))
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_a_damaged_best_state_is_named_and_not_begun_over(model: LoadedModel, tmp_path: Path) -> None:
    given = options(tmp_path)
    with pytest.raises(Killed):
        api.finetune(model, callback=killed_after(3), **given)
    (tmp_path / "run" / "best" / "state.json").write_text("{")
    with pytest.raises(UserError, match="already holds a run"):
        api.finetune(model, **given)
    with pytest.raises(UserError, match="best is damaged"):
        api.finetune(model, **given, resume=True)


@pytest.mark.parametrize("steps", [5, None])
def test_overwriting_begins_over_and_keeps_what_is_not_the_runs(
    model: LoadedModel, tmp_path: Path, steps: int | None
) -> None:
    """An unfinished run, and a finished one."""
    given = options(tmp_path, **EVERY)
    if steps:
        with pytest.raises(Killed):
            api.finetune(model, callback=killed_after(steps), **given)
    else:
        api.finetune(model, **given)
    own = [tmp_path / "run" / "notes.txt", tmp_path / "run" / "checkpoints" / "notes.txt"]
    for path in own:
        path.write_text("mine")
    stale = tmp_path / "run" / "tokenizer.json"  # of another model, say
    stale.write_text("{}")
    shorter = {"max_steps": 3, "learning_rate": 2e-3, **NEVER}
    api.finetune(model, **given | shorter, overwrite=True)
    api.finetune(model, **options(tmp_path, "whole", **shorter))
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert [path.read_text() for path in own] == ["mine"] * 2
    assert not stale.exists()
    assert [path.name for _, path in run_checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-3"]
    record = api.finetune(model, resume=True, output=given["output"], max_steps=4)  # which is not overwritten again
    assert record.steps == 4


def test_a_run_that_is_refused_overwrites_nothing(model: LoadedModel, tmp_path: Path) -> None:
    api.finetune(model, **options(tmp_path, max_steps=2))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "bad.jsonl").write_text("{")
    for wrong in ({"data": str(tmp_path / "bad.jsonl")}, {"memory_budget": "1kB"}, {"resume": True}):
        with pytest.raises(UserError):
            api.finetune(model, **options(tmp_path) | {"overwrite": True} | wrong)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--output", str(tmp_path), "--data", "rows.jsonl", "--resume", "--overwrite"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("minutes", "steps", "took", "saved"),
    [
        (50.0, 0, 0.0, [3, 6, 7]),
        (0.0, 0, 0.0, [7]),
        (50.0, 2, 0.0, [2, 4, 6, 7]),
        (20.0, 0, 0.0, [*range(1, 8)]),
        (20.0, 0, 36.0, [3, 6, 7]),  # 1% of an hour
    ],
)
def test_a_checkpoint_is_due_by_time(
    model: LoadedModel, tmp_path: Path, minutes: float, steps: int, took: float, saved: list[int]
) -> None:
    given = options(tmp_path, heldout=False, save_steps=steps, save_minutes=minutes)
    job, found = prepare_job(TrainingArguments(**given), model), list[int]()

    def step(result: StepResult) -> None:
        job.run.state.between_seconds[CHECKPOINT] = took

    job.train(hearing(step=step, saved=lambda path, step, adapter: found.append(step)))
    assert found == saved


def pipeline(model: LoadedModel, tmp_path: Path, place: str, **how: Any) -> MultiAdapterPipeline:
    given = options(tmp_path, place, **how)
    own = {name: given.pop(name) for name in ("data", "eval_data", "output", "max_steps", "lora_r")}
    adapters = [
        {"data": own["data"], "eval_data": own["eval_data"], "checkpoint": f"{own['output']}/{n}", "max_steps": s}
        for n, s in (("a", 7), ("b", 4))
    ]
    return MultiAdapterPipeline(adapters, model, output=f"{own['output']}/pipeline", lora_r=4, **given)


@pytest.mark.parametrize("changes", [EVERY, {"eval_steps": 2}])
def test_a_killed_pipeline_goes_on_from_its_newest_state(
    model: LoadedModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Saved by time, or once with the first best adapter, since best/ alone is not the state of a pipeline."""
    with pytest.raises(Killed):
        pipeline(model, tmp_path, "run", **changes).train(killed_after(3))
    home = tmp_path / "run" / "pipeline"
    assert read_pipeline_state(home).step == 2
    with pytest.raises(UserError, match="already belongs to a pipeline: continue it with resume=True, begin over with"):
        pipeline(model, tmp_path, "run", **changes).train()
    pipeline(model, tmp_path, "run", **changes, resume=True).train()
    pipeline(model, tmp_path, "whole").train()
    for name in "ab":
        assert result(tmp_path / "run" / name) == result(tmp_path / "whole" / name)
    with pytest.raises(Killed):
        pipeline(model, tmp_path, "run", overwrite=True, learning_rate=2e-3).train(killed_after(1))
    assert not any((tmp_path / "run" / place / name).exists() for place, name in (("pipeline", STATE), ("a", "last")))
