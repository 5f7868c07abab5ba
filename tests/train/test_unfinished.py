"""Runs that were killed: saved by time as well, resumed from their newest state, begun over only on request."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.events import hearing
from support.shared_runs import files_of, killed_run, result, run_options

from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.loop import trainer
from wgpu_lora.train.loop.slot_progress import CHECKPOINT
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.pipeline_state import read_pipeline_state
from wgpu_lora.train.run.run_state import STATE, read_state

NEVER: dict[str, Any] = {"save_steps": 0, "save_minutes": 0.0}
EVERY: dict[str, Any] = {"save_steps": 0, "save_minutes": 10.0}


class Killed(Exception):
    """Ends a run as a kill does: nothing more is saved."""


def killed_after(step: int) -> Callable[[StepResult], None]:
    def callback(result: StepResult) -> None:
        if result.step == step:
            raise Killed

    return callback


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes twenty minutes, by the clock that tells when to save."""
    passed = count(20 * 60, 20 * 60)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(passed), perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer, "time", clock)


def options(place: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Without checkpoints, unless a test asks for them."""
    given = run_options(place, name, **{"model": None, "save_total_limit": None, **NEVER, **changes})
    return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "newest"),
    [
        ({}, "best"),
        ({"save_steps": 3}, "best"),  # of step 4, and a checkpoint of step 3
        ({"save_steps": 4}, "step-4"),  # best/ is of the same step
        (EVERY, "step-4"),
    ],
)
def test_the_newest_complete_state_is_resumed(
    qwen2: LoadedModel, tmp_path: Path, finished_run: Path, changes: dict[str, Any], newest: str
) -> None:
    given = options(finished_run, output=str(tmp_path / "run"), **changes)
    with pytest.raises(Killed):
        api.finetune(qwen2, callback=killed_after(5), **given)
    found = run_checkpoint.latest_checkpoint(tmp_path / "run")
    assert found
    assert (found.name, read_state(found)[0].step) == (newest, 4)
    with pytest.raises(UserError, match=r"already holds a run: continue it with resume=True, begin over with overwr"):
        api.finetune(qwen2, **given)
    api.finetune(qwen2, resume=True, output=given["output"])
    assert result(tmp_path / "run") == result(finished_run / "run")


@pytest.mark.parametrize("finished", [False, True])
def test_overwriting_begins_over_and_keeps_what_is_not_the_runs(
    qwen2: LoadedModel, tmp_path: Path, finished_run: Path, finished: bool
) -> None:
    run = tmp_path / "run"
    if finished:
        shutil.copytree(finished_run / "run", run)
    else:
        killed_run(finished_run, tmp_path)
    own = [run / "notes.txt", run / "checkpoints" / "notes.txt"]
    for path in own:
        path.write_text("mine")
    stale = run / "tokenizer.json"  # of another qwen2, say
    stale.write_text("{}")
    changes = {"max_steps": 3, "learning_rate": 2e-3, **NEVER}
    api.finetune(qwen2, **options(finished_run, output=str(run), **changes), overwrite=True)
    api.finetune(qwen2, **options(finished_run, output=str(tmp_path / "whole"), **changes))
    assert result(run) == result(tmp_path / "whole")
    assert [path.read_text() for path in own] == ["mine"] * 2
    assert not stale.exists()
    assert [path.name for _, path in run_checkpoint.list_checkpoints(run / "checkpoints")] == ["step-3"]
    record = api.finetune(qwen2, resume=True, output=str(run), max_steps=4)  # which is not overwritten again
    assert record.steps == 4


def test_a_run_that_is_refused_overwrites_nothing(qwen2: LoadedModel, tmp_path: Path, finished_run: Path) -> None:
    run = Path(shutil.copytree(finished_run / "run", tmp_path / "run"))
    (tmp_path / "bad.jsonl").write_text("{")
    given = options(finished_run, output=str(run), overwrite=True)
    for wrong in ({"data": str(tmp_path / "bad.jsonl")}, {"memory_budget": "1kB"}, {"resume": True}):
        with pytest.raises(UserError):
            api.finetune(qwen2, **given | wrong)
    assert files_of(run) == files_of(finished_run / "run")


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
    qwen2: LoadedModel, tmp_path: Path, minutes: float, steps: int, took: float, saved: list[int]
) -> None:
    given = options(tmp_path, eval_data=None, save_steps=steps, save_minutes=minutes)
    job, found = prepare_job(TrainingArguments(**given), qwen2), list[int]()

    def step(result: StepResult) -> None:
        job.run.state.between_seconds[CHECKPOINT] = took

    job.train(hearing(step=step, saved=lambda path, step, adapter: found.append(step)))
    assert found == saved


def pipeline(qwen2: LoadedModel, tmp_path: Path, place: str, **how: Any) -> MultiAdapterPipeline:
    given = options(tmp_path, place, **how)
    own = {name: given.pop(name) for name in ("data", "eval_data", "output", "max_steps", "lora_r")}
    adapters = [
        {"data": own["data"], "eval_data": own["eval_data"], "checkpoint": f"{own['output']}/{n}", "max_steps": s}
        for n, s in (("a", 7), ("b", 4))
    ]
    return MultiAdapterPipeline(adapters, qwen2, output=f"{own['output']}/pipeline", lora_r=4, **given)


@pytest.mark.parametrize("changes", [EVERY, {"eval_steps": 2}])
def test_a_killed_pipeline_goes_on_from_its_newest_state(
    qwen2: LoadedModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Saved by time, or once with the first best adapter, since best/ alone is not the state of a pipeline."""
    with pytest.raises(Killed):
        pipeline(qwen2, tmp_path, "run", **changes).train(killed_after(3))
    home = tmp_path / "run" / "pipeline"
    assert read_pipeline_state(home).step == 2
    with pytest.raises(UserError, match="already belongs to a pipeline: continue it with resume=True, begin over with"):
        pipeline(qwen2, tmp_path, "run", **changes).train()
    pipeline(qwen2, tmp_path, "run", **changes, resume=True).train()
    pipeline(qwen2, tmp_path, "whole").train()
    for name in "ab":
        assert result(tmp_path / "run" / name) == result(tmp_path / "whole" / name)
    with pytest.raises(Killed):
        pipeline(qwen2, tmp_path, "run", overwrite=True, learning_rate=2e-3).train(killed_after(1))
    assert not any((tmp_path / "run" / place / name).exists() for place, name in (("pipeline", STATE), ("a", "last")))
