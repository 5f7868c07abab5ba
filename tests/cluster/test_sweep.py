"""A sweep's grid, its tasks and its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wgpu_lora.cluster.messages import RunRequirements, RunView, Snapshot, Task, TaskProgress, TaskView
from wgpu_lora.cluster.sweep import (
    SweepOptions,
    grid_of,
    grid_point,
    grid_size,
    plan_sweep,
    ranked,
    sweep_tasks,
    write_results,
)
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.train.options.training_arguments import TrainingArguments


@pytest.fixture(autouse=True)
def on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with naming(COMMAND_LINE):
        yield


ARGS = TrainingArguments(data="a.jsonl", output="out", model="demo")


def test_a_grid_has_every_combination_once() -> None:
    grid = grid_of(["lora_r=8,16", "learning_rate=1e-4,2e-4,4e-4", "use-dora=true,false"])
    assert grid == {"lora_r": [8, 16], "learning_rate": [1e-4, 2e-4, 4e-4], "use_dora": [True, False]}
    points = [grid_point(grid, index) for index in range(grid_size(grid))]
    assert len({json.dumps(point) for point in points}) == grid_size(grid) == 12
    assert points[1] == {"lora_r": 8, "learning_rate": 1e-4, "use_dora": False}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_indices_and_combinations_correspond(sizes: list[int]) -> None:
    grid = {str(number): list(range(size)) for number, size in enumerate(sizes)}
    assert len({tuple(grid_point(grid, index).values()) for index in range(grid_size(grid))}) == grid_size(grid)


def test_values_with_commas_and_none() -> None:
    grid = grid_of(["target_modules=q_proj,v_proj;all-linear", "max_length=none,128"])
    assert grid == {"target_modules": ["q_proj,v_proj", "all-linear"], "max_length": [None, 128]}
    assert grid_of(["optim_args=beta1=0.8;beta1=0.9"]) == {"optim_args": ["beta1=0.8", "beta1=0.9"]}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "needs something to vary"),
        (["lora_r"], "is not NAME=VALUE,VALUE"),
        (["lora_r=8,,16"], "is not NAME=VALUE,VALUE"),
        (["lora_rr=8"], "did you mean --lora-r"),
        (["lora_r=8,x"], "--lora-r must be a whole number, not 'x'"),
        (["use_dora=perhaps"], "--use-dora must be true or false"),
        (["learning_rate=fast"], "--learning-rate must be a number"),
        (["lora_r=8,8"], "has the value 8 twice"),
        (["lora_r=8", "lora_r=16"], "is given twice"),
        (["device=0,1"], "--device cannot be varied, since the cluster chooses"),
        (["validation_split=0.1,0.2"], "--validation-split cannot be varied, since the losses"),
        (["output=a,b"], "--output cannot be varied"),
    ],
)
def test_wrong_grids(params: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        grid_of(params)


def test_tasks_have_the_values_and_directories_of_their_own(tmp_path: Path) -> None:
    tasks = sweep_tasks(grid_of(["lora_r=8,16", "learning_rate=1e-4"]), SweepOptions(), ARGS)
    assert [task.name for task in tasks] == ["lora_r-8_learning_rate-0.0001", "lora_r-16_learning_rate-0.0001"]
    assert tasks[0].output == str(tmp_path / "out/lora_r-8_learning_rate-0.0001")
    assert tasks[0].params == {"lora_r": 8, "learning_rate": 1e-4}
    assert tasks[0].options == {"data": str(tmp_path / "a.jsonl"), "model": "demo", "lora_r": 8, "learning_rate": 1e-4}


def test_long_or_odd_values_give_numbered_names() -> None:
    tasks = sweep_tasks(grid_of(["target_modules=.*(q|v)_proj;" + "q_proj," * 20 + "v_proj"]), SweepOptions(), ARGS)
    assert [task.name for task in tasks] == ["trial-1", "trial-2"]


def test_max_trials_draws_by_the_seed() -> None:
    grid = grid_of([f"lora_r={','.join(map(str, range(1, 101)))}", f"seed={','.join(map(str, range(200)))}"])
    with pytest.raises(UserError, match="A grid of 20,000 adapters is more than 10,000"):
        sweep_tasks(grid, SweepOptions(), ARGS)
    first, again = (sweep_tasks(grid, SweepOptions(max_trials=7), ARGS) for _ in range(2))
    assert len({json.dumps(task.params) for task in first}) == 7
    assert first == again


@pytest.mark.parametrize(
    ("values", "params", "message"),
    [
        ({"data": None}, ["lora_r=1"], "A sweep needs --data"),
        ({"output": None}, ["lora_r=1"], "A sweep needs --output"),
        ({"validation_split": 0.1}, ["seed=1,2"], "chooses the held-out rows"),
        ({}, ["lora_r=0,8"], r"--lora-r must be greater than 0"),
        ({"learning_rate": 1e-4}, ["lr_scheduler_min=1e-3"], "is more than the peak"),
    ],
)
def test_wrong_sweeps(values: dict[str, Any], params: list[str], message: str) -> None:
    args = TrainingArguments(**{**{"data": "a.jsonl", "output": "out"}, **values})
    with pytest.raises(UserError, match=message):
        sweep_tasks(grid_of(params), SweepOptions(), args)


def test_a_directory_with_results_is_not_used_again() -> None:
    Path("out").mkdir()
    Path("out/sweep.json").touch()
    with pytest.raises(UserError, match=r"already holds a sweep's sweep\.json"):
        sweep_tasks(grid_of(["lora_r=1"]), SweepOptions(), ARGS)


def test_what_plans_say_about_comparing() -> None:
    tasks = [Task("a", {"data": "a"}, "/a"), Task("b", {"data": "b", "eval_steps": 3}, "/b")]

    def plans(steps: int, heldout: bool = True) -> dict[str, dict[str, RunRequirements]]:
        return {
            "a": {"x": RunRequirements(steps=steps, heldout=heldout)},
            "b": {"x": RunRequirements(steps=100, heldout=True)},
        }

    sweep, same = plan_sweep(SweepOptions(), tasks, plans(0))
    assert (sweep.scheduler, same) == ("none", tasks)
    sweep, task_options = plan_sweep(SweepOptions(scheduler="asha"), tasks, plans(60))
    assert sweep == SweepOptions(scheduler="asha", grace_period=6)
    assert [task.options["eval_steps"] for task in task_options] == [6, 3]
    with pytest.raises(UserError, match="--metric eval_loss needs held-out rows, but a has none"):
        plan_sweep(SweepOptions(), tasks, plans(60, heldout=False))
    assert plan_sweep(SweepOptions(metric="loss"), tasks, plans(60, heldout=False))[0].metric == "loss"
    with pytest.raises(UserError, match="these end by time"):
        plan_sweep(SweepOptions(scheduler="asha"), tasks, plans(0))
    with pytest.raises(UserError, match="--grace-period 100 leaves nothing"):
        plan_sweep(SweepOptions(scheduler="asha", grace_period=100), tasks, plans(60))
    _, task_options = plan_sweep(SweepOptions(scheduler="pbt", perturbation_interval=5), tasks, plans(60))
    assert [(task.options["eval_steps"], task.options["save_steps"]) for task in task_options] == [(5, 5), (3, 5)]
    with pytest.raises(UserError, match="--param --lora-r cannot be varied with --scheduler pbt"):
        plan_sweep(SweepOptions(scheduler="pbt"), [replace(task, params={"lora_r": 4}) for task in tasks], plans(60))


def test_the_best_comes_first_and_failed_ones_last(tmp_path: Path) -> None:
    def view(name: str, state: str, best: float | None, run: str = "r") -> TaskView:
        progress = TaskProgress(step=5, total_steps=9, loss=1.0, eval_loss=9.0, best_eval_loss=best)
        return TaskView(run, name, state, None, progress, str(tmp_path / "out" / name), params={"lora_r": len(name)})

    (tmp_path / "out").mkdir()
    views = [
        view("worst", "finished", 3.0), view("failed", "failed", 0.1), view("early", "stopped", 2.0),
        view("best", "finished", 1.0), view("none", "pending", float("nan")), view("other", "finished", 0.0, "s"),
    ]  # fmt: skip
    assert [trial.name for trial in ranked(views[:5], "eval_loss")] == ["best", "early", "worst", "failed", "none"]
    run = RunView("r", "me", 0.0, True, sweep=SweepOptions())
    path = write_results(Snapshot(0.0, [run], views, [], []), run)
    assert path == tmp_path / "out/sweep.json"
    report = json.loads(path.read_text())
    assert [adapter["name"] for adapter in report["adapters"]] == ["best", "early", "worst", "failed", "none"]
    assert report["adapters"][0]["value"] == 1.0
    assert report["adapters"][0]["params"] == {"lora_r": 4}
    assert report["metric"] == "eval_loss"
