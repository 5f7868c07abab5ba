"""Adapters trained together equal those trained alone; how they are given, and the policies that choose among them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import path_of
from support.cli import Run
from support.sampling import sample
from support.training.shared_runs import WEIGHTS, files_of, multi_adapter_options, multi_adapter_tasks, result
from support.training.training import model_dir

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import UserError
from wgpu_lora.events import StepResult
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.adapter_tasks import (
    check_distinct,
    read_tasks,
    request_of,
    task_of,
    task_of_pair,
    tasks_of_request,
    uniquely_named,
)
from wgpu_lora.train.loop.slot_policy import PATIENCE, POLICIES, make_policy, policy_state
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.records import PipelineRecord
from wgpu_lora.train.run.run_checkpoint import RunState
from wgpu_lora.train.run.training_log import LOG, read_log


def together(
    qwen2: LoadedModel, tmp_path: Path, place: str, callback: Callable[[StepResult], None] = lambda r: None, **how: Any
) -> dict[str, Any]:
    output = str(tmp_path / place / "pipeline")
    pipeline = MultiAdapterPipeline(
        multi_adapter_tasks(tmp_path, place), qwen2, output=output, **multi_adapter_options(**how)
    )
    return pipeline.train(callback)


def alone(qwen2: LoadedModel, tmp_path: Path) -> None:
    """Each alone, once for all tests of a directory."""
    for values in multi_adapter_tasks(tmp_path, "alone"):
        task = task_of(values, "task")
        base = TrainingArguments(**multi_adapter_options(model=qwen2.name))
        prepare_job(task.arguments(base), qwen2).train()


def assert_same(tmp_path: Path, place: str, names: str = "abc") -> None:
    """Within 1e-4 of the change from the initial adapter, by Frobenius norm, tensor by tensor."""
    for name in names:
        got, expected = (load_file(tmp_path / p / name / WEIGHTS) for p in (place, "alone"))
        assert got.keys() == expected.keys()
        begin = load_file(tmp_path / "start" / name / WEIGHTS)
        for key, value in expected.items():
            moved = np.linalg.norm(value.astype(np.float64) - begin[key])
            assert moved > 0
            assert np.linalg.norm(got[key].astype(np.float64) - value) < 1e-4 * moved, f"{name} {key}"


@pytest.fixture(scope="module")
def trained(qwen2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every adapter trained alone, and its state before the first step."""
    tmp_path = tmp_path_factory.mktemp("pipeline")
    alone(qwen2, tmp_path)
    for values in multi_adapter_tasks(tmp_path, "start"):
        values["learning_rate"], values["max_steps"] = 0.0, 1
        prepare_job(
            task_of(values, "task").arguments(TrainingArguments(**multi_adapter_options(model=qwen2.name))), qwen2
        ).train()
    return tmp_path


@pytest.mark.parametrize("schedule", POLICIES)
def test_together_is_as_alone(qwen2: LoadedModel, trained: Path, schedule: str) -> None:
    adapters: list[str] = []
    record = together(qwen2, trained, schedule, lambda result: adapters.append(result.adapter), schedule=schedule)
    assert_same(trained, schedule)
    assert [a.stop_reason for a in record.adapters] == ["epochs", "epochs", "max steps"]
    steps = {a.name: a.step for a in record.adapters}
    assert {name: adapters.count(name) for name in "abc"} == steps
    if schedule == "synchronized":
        assert record.step == max(steps.values())
        assert adapters[:3] == ["a", "b", "c"]
    else:
        assert record.step == sum(steps.values())
    if schedule == "round-robin":
        assert adapters[:4] == ["a", "b", "c", "a"]
    content = json.loads((trained / schedule / "pipeline" / "pipeline.json").read_text())
    assert PipelineRecord.from_json(content) == record


@pytest.mark.parametrize("schedule", sample(list(POLICIES), 1 / 3))
def test_a_poisoned_adapter_stops_alone(qwen2: LoadedModel, trained: Path, schedule: str) -> None:
    """With a learning rate that would take b's weights out of range, b is not updated, and the others finish."""
    place = f"poisoned-{schedule}"
    tasks = multi_adapter_tasks(trained, place)
    tasks[1]["learning_rate"] = 1e30
    output = trained / place / "pipeline"
    record = MultiAdapterPipeline(tasks, qwen2, output=str(output), **multi_adapter_options(schedule=schedule)).train()
    assert [a.stop_reason for a in record.adapters] == ["epochs", "diverged", "max steps"]
    assert_same(trained, place, "ac")
    poisoned = trained / place / "b"
    for directory in (poisoned, poisoned / "last"):
        assert max(np.abs(values).max() for values in load_file(directory / WEIGHTS).values()) < 1
    assert [entry["step"] for entry in read_log(poisoned / LOG)] == [0]


@pytest.mark.parametrize(("harmed", "step"), [("weights", 0), ("gradient", 2)])
def test_an_adapter_that_is_not_finite_stops_alone(qwen2: LoadedModel, trained: Path, harmed: str, step: int) -> None:
    """If b's weights are not finite after step 2, b returns to its state before, since a pipeline keeps one checkpoint,
    and that of step 2 is of no use; if only a's gradient is not, its adapter of step 2 is kept."""
    name, output = {"weights": "b", "gradient": "a"}[harmed], str(trained / harmed / "pipeline")
    options = multi_adapter_options(save_steps=1 if harmed == "weights" else 3)
    pipeline = MultiAdapterPipeline(multi_adapter_tasks(trained, harmed), qwen2, output=output, **options)
    session = pipeline.job.session

    def harm(result: StepResult) -> None:
        if (result.adapter, result.step) == (name, 2):
            factor = session.adapters.factors[path_of(0, "q_proj"), "A"]
            pages = session.adapters.params if harmed == "weights" else session.adapters.grads
            place = 4 * (factor.offset + "ab".index(name) * factor.stride)  # slots follow each other
            session.device.write(pages[factor.page].storage.buffer, np.full(4, np.nan, np.float32), place)

    record = pipeline.train(harm)
    reasons = {"a": "epochs", "b": "epochs", "c": "max steps"} | {name: "non-finite"}
    assert {a.name: a.stop_reason for a in record.adapters} == reasons
    assert record.adapters["ab".index(name)].step == step
    assert_same(trained, harmed, "abc".replace(name, ""))
    assert all(np.isfinite(values).all() for values in load_file(trained / harmed / name / WEIGHTS).values())
    last = json.loads((trained / harmed / name / "last" / "metadata.json").read_text())
    assert (last["step"], last["name"], last["slot"]) == (step, name, "ab".index(name))


CHILD = """
import json, os, signal, sys
from wgpu_lora.train.run import multi_adapter_run
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
tasks, options, deadly, where = json.loads(sys.argv[1])
steps = [0]
def callback(result):
    steps[0] += 1
    if where == "step" and steps[0] == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
real = multi_adapter_run.replace_directory
def dying(tmp, final):
    steps[0] += 1
    if where == "move" and steps[0] == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    real(tmp, final)
if where == "move":
    multi_adapter_run.replace_directory = dying
    callback = lambda result: None
MultiAdapterPipeline(tasks, **options).train(callback)
"""


def child(tasks: list[dict[str, Any]], opts: dict[str, Any], deadly: int = 0, where: str = "step") -> int:
    arguments = json.dumps([tasks, opts, deadly, where])
    return subprocess.run([sys.executable, "-c", CHILD, arguments], check=False, timeout=300).returncode


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(
    ("schedule", "deadly", "where"),
    sample([("synchronized", 10, "step"), ("priority-val-loss", 9, "step"), ("synchronized", 5, "move")], 1 / 3),
)
def test_a_killed_pipeline_resumes_byte_for_byte(tmp_path: Path, schedule: str, deadly: int, where: str) -> None:
    """Killed within a step, or while checkpoints are moved into place: the result is the same."""

    def opts(place: str, **changes: Any) -> dict[str, Any]:
        where = str(tmp_path / place / "pipeline")
        return multi_adapter_options(model=str(model_dir("qwen2")), schedule=schedule, output=where) | changes

    assert child(multi_adapter_tasks(tmp_path, "whole"), opts("whole")) == 0
    assert child(multi_adapter_tasks(tmp_path, "killed"), opts("killed"), deadly, where) == -signal.SIGKILL
    assert child(multi_adapter_tasks(tmp_path, "killed"), opts("killed", resume=True)) == 0
    for name in "abc":
        for file in (f"last/{WEIGHTS}", "last/optimizer.safetensors", f"best/{WEIGHTS}"):
            assert (tmp_path / "killed" / name / file).read_bytes() == (tmp_path / "whole" / name / file).read_bytes()
        assert result(tmp_path / "killed" / name) == result(tmp_path / "whole" / name)
    states = [read_multi_adapter_state(tmp_path / p / "pipeline") for p in ("killed", "whole")]
    assert replace(states[0], request={}) == replace(states[1], request={})  # which has paths of its own


def test_resuming_asks_for_the_same(qwen2: LoadedModel, finished_multi_adapter_run: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(finished_multi_adapter_run, tmp_path / "place"))
    tasks, before = multi_adapter_tasks(place, "run"), files_of(place)
    output, empty = str(place / "run" / "pipeline"), str(tmp_path / "empty")
    arguments: dict[str, Any] = {"output": output, "max_steps": 4, "save_steps": 1, "resume": True}
    for count, changes, words in (
        (3, {"output": empty}, "There is no checkpoint"),
        (3, {"resume": False}, "already belongs to a pipeline"),
        (3, {"schedule": "round-robin"}, "schedule was 'synchronized', not 'round-robin'"),
        (2, {}, "also has an adapter 'c'"),
        (3, {"seed": 1}, "seed was 42, not 1"),
    ):
        with pytest.raises(UserError, match=words):
            MultiAdapterPipeline(tasks[:count], qwen2, **multi_adapter_options(**arguments | changes))
    assert files_of(place) == before
    record = MultiAdapterPipeline(
        tasks, qwen2, **multi_adapter_options(**arguments)
    ).train()  # it is done: nothing more
    assert [a.step for a in record.adapters] == [4, 4, 3]


def test_priority_needs_heldout_data(qwen2: LoadedModel, trained: Path) -> None:
    tasks = multi_adapter_tasks(trained, "blind")
    del tasks[1]["eval_data"]
    how = multi_adapter_options(schedule="priority-val-loss", output=str(trained / "blind" / "pipeline"))
    with pytest.raises(UserError, match="adapter 'b' has none"):
        MultiAdapterPipeline(tasks, qwen2, **how)


def test_shared_batches_are_bounded(qwen2: LoadedModel, trained: Path) -> None:
    tasks = multi_adapter_tasks(trained, "bounded")
    output = str(trained / "bounded" / "pipeline")

    def buckets(**how: Any) -> list[int]:
        return sorted(
            MultiAdapterPipeline(tasks, qwen2, output=output, **multi_adapter_options(**how)).job.session.steps
        )

    most = max(buckets(schedule="round-robin"))
    assert max(buckets()) > most
    assert max(buckets(batch_tokens=48)) == 48
    with pytest.raises(UserError, match="less than the longest row"):
        buckets(batch_tokens=4)


# -- the adapters of a pipeline, and the policies that choose among them -----------------------------------------------


def test_a_pair() -> None:
    task = task_of_pair("data/a.jsonl:checkpoints/first")
    assert (task.data, task.checkpoint, task.name) == ("data/a.jsonl", "checkpoints/first", "first")
    args = task.arguments(TrainingArguments(lora_r=3))
    assert (args.data, args.output, args.lora_r) == ("data/a.jsonl", "checkpoints/first", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl", "is not DATA:CHECKPOINT"),
        ("a.jsonl:", "is not DATA:CHECKPOINT"),
        (":out", "is not DATA:CHECKPOINT"),
        ("C:/a.jsonl:out", "more than one colon"),
    ],
)
def test_a_pair_that_is_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of_pair(text)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "adapters.toml"
    path.write_text(
        '[[adapter]]\ndata = "odd:name.jsonl"\ncheckpoint = "out/a"\nrank = 8\nalpha = 4\ndropout = 0.1\n'
        'target_modules = ["q_proj", "v_proj"]\nepochs = 2\nweight = 2\nobjective = "sft"\n'
        '[[adapter]]\nname = "b"\ndata = "b.jsonl"\ncheckpoint = "out/b"\nlearning_rate = 1e-3\nmax_length = 64\n'
    )
    first, second = read_tasks(path)
    args = first.arguments(TrainingArguments())
    assert (args.data, args.lora_r, args.lora_alpha, args.lora_dropout) == ("odd:name.jsonl", 8, 4, 0.1)
    assert (args.target_modules, args.num_train_epochs, args.gradient_accumulation_steps) == ("q_proj,v_proj", 2, None)
    assert first.arguments(TrainingArguments(gradient_accumulation_steps=3)).gradient_accumulation_steps == 6
    assert second.name == "b"
    assert second.arguments(TrainingArguments()).max_length == 64
    check_distinct([first, second])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no \\[\\[adapter\\]\\] table"),
        ("adapter = 3", "no \\[\\[adapter\\]\\] table"),
        ("[[adapter]\n", "not valid TOML"),
        ("rank = 3\n[[adapter]]\n", "unknown key 'rank'"),
        ('[[adapter]]\ndata = "x"\n', "has no 'checkpoint'"),
        ('[[adapter]]\ndata = "x"\ncheckpoint = "y"\nranks = 2\n', "did you mean 'rank'"),
        ('[[adapter]]\ndata = "x"\ncheckpoint = "y"\nweight = 0\n', "'weight' must be"),
        ('[[adapter]]\ndata = 3\ncheckpoint = "y"\n', "'data' must be UTF-8 text"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "adapters.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_tasks(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rank", "8", "The adapter y: 'rank' must be a whole number"),
        ("rank", 0, "The adapter y: 'rank' must be greater than 0"),
        (
            "objective",
            "ppo",
            "The adapter y: 'objective' must be one of sft, dpo, kto, orpo, cpo, kd, grpo, rloo, not ppo",
        ),
        ("weight", 0.5, "at least 2"),
    ],
)
def test_values_of_the_wrong_kind(key: str, value: object, words: str) -> None:
    task = task_of({"data": "x", "checkpoint": "y", key: value}, "here")
    with pytest.raises(UserError, match=words):
        task.arguments(TrainingArguments(gradient_accumulation_steps=1))


def test_directories_and_names_are_apart() -> None:
    other = task_of({"data": "y", "checkpoint": "./a", "name": "b"}, "b")
    for tasks, words in (
        ([task_of_pair("x:one/a"), task_of_pair("x:two/a")], "named 'a'"),
        ([task_of_pair("x:a"), other], "directory of adapter 'a'"),
        ([task_of_pair("x:one/a"), task_of_pair("x:one/a/last")], "is inside another adapter's directory"),
    ):
        with pytest.raises(UserError, match=words):
            check_distinct(tasks)
    check_distinct([task_of_pair("x:one/a"), task_of_pair("x:one/b")])
    renamed = uniquely_named([task_of_pair("x:one/a"), task_of_pair("y:two/a"), task_of_pair("z:b")])
    assert [task.name for task in renamed] == ["one/a", "two/a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapters", "missing.jsonl:out/a"], "missing.jsonl"),
        (["--adapters", "a:b:c"], "more than one colon"),
        (["--adapters-config", "missing.toml"], "missing.toml cannot be read"),
        (["--adapters", "x:a", "--adapters", "y:./a/"], "give each its own"),
        (["--schedule", "synchronized"], "--schedule does nothing without --adapters"),
        (["--adapters", "x:a", "--wait", "-5"], "--wait must be 0 or more"),
        (["--adapters", "x:a", "--schedule", "fair"], "--schedule must be one of"),
        (["--adapters", "x:a", "--data", "y"], "cannot be combined"),
        (["--adapters", "x:a", "--target-seconds", "9"], "--target-seconds works with one adapter"),
        (["--adapters", "x:a", "--batch-tokens", "0"], "--batch-tokens must be"),
    ],
)
def test_the_command_line_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run("finetune", *options).refusal()
    assert not list(tmp_path.iterdir())


def standing(slot: int, now: float | None = None, start: float | None = None) -> Any:
    return SimpleNamespace(slot=slot, state=RunState(last_eval_loss=now, first_eval_loss=start))


def test_recorded_paths_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = tmp_path / "began"
    (began / "sft").mkdir(parents=True)
    for name in ("rows.jsonl", "held.jsonl"):
        (began / name).touch()
    options = {"objective": "dpo", "eval_data": "held.jsonl", "init_adapter": "sft", "reference_adapter": "sft"}
    task = task_of({"data": "rows.jsonl", "checkpoint": str(began / "out" / "a"), **options}, "a")
    request = {"directory": str(began), "adapters": request_of([task], began / "out")}
    monkeypatch.chdir(tmp_path)
    [adapter_task] = tasks_of_request(request, began / "out")
    assert adapter_task.data == str(began / "rows.jsonl")
    paths = {name: str(began / options[name]) for name in ("eval_data", "init_adapter", "reference_adapter")}
    assert adapter_task.options == options | paths


def test_turns() -> None:
    policy = make_policy("round-robin")
    live = [standing(slot) for slot in (0, 1, 2)]
    assert [policy.choose(live)[0] for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose([live[0], live[2]])[0] for _ in range(3)] == [2, 0, 2]  # 1 has ended: no turn is lost
    assert make_policy("synchronized").choose(live) == [0, 1, 2]


def test_the_worst_goes_first_and_none_starves() -> None:
    policy = make_policy("priority-val-loss")
    measured = [standing(0, 1.0, 2.0), standing(1, 1.9, 2.0), standing(2, 5.0, 8.0)]
    assert policy.choose(measured) == [1]
    assert policy.choose([*measured, standing(3)]) == [3]  # never measured
    slots = [policy.choose(measured)[0] for _ in range(60)]
    assert set(slots) == {0, 1, 2}
    for slot in (0, 2):
        turns = [i for i, turn in enumerate(slots) if turn == slot]
        assert max(b - a for a, b in pairwise(turns)) <= PATIENCE * 3 + 2
    assert slots.count(1) > 40


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_goes_on_where_it_was(name: str) -> None:
    live = [standing(slot, 1.0 + slot, 2.0) for slot in range(3)]
    policy = make_policy(name)
    for _ in range(5):
        policy.choose(live)
    again = make_policy(name, policy_state(policy))
    assert [again.choose(live) for _ in range(30)] == [policy.choose(live) for _ in range(30)]
