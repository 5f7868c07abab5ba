"""The adapters of a pipeline, and the policies that choose among them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.train.adapter_tasks import (
    check_apart,
    named_apart,
    read_tasks,
    request_of,
    task_of,
    task_of_pair,
    tasks_of_request,
)
from wgpu_lora.train.loop.slot_policy import PATIENCE, POLICIES, Standing, make_policy, policy_state
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.run_checkpoint import RunState


def test_a_pair() -> None:
    task = task_of_pair("data/a.jsonl:checkpoints/first")
    assert (task.data, task.checkpoint, task.name) == ("data/a.jsonl", "checkpoints/first", "first")
    args = task.arguments(TrainingArguments(lora_r=3))
    assert (args.data, args.output, args.lora_r) == ("data/a.jsonl", "checkpoints/first", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.jsonl", "is not DATA:CHECKPOINT"),
        ("a.jsonl:", "is not DATA:CHECKPOINT"),
        (":out", "is not DATA:CHECKPOINT"),
        ("C:/a.jsonl:out", "more than one colon"),
    ],
)
def test_a_pair_that_is_none(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
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
    check_apart([first, second])


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "adapters.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_tasks(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rank", "8", "The adapter y: 'rank' must be a whole number"),
        ("rank", 0, "The adapter y: 'rank' must be greater than 0"),
        ("objective", "ppo", "The adapter y: 'objective' must be one of sft, dpo, kto, orpo, cpo, kd, not ppo"),
        ("weight", 0.5, "at least 2"),
    ],
)
def test_values_of_the_wrong_kind(key: str, value: object, words: str) -> None:
    task = task_of({"data": "x", "checkpoint": "y", key: value}, "here")
    with pytest.raises(UserError, match=words):
        task.arguments(TrainingArguments(gradient_accumulation_steps=1))


def test_directories_and_names_are_apart() -> None:
    def check(*places: str) -> None:
        check_apart([task_of_pair(f"x:{place}") for place in places])

    with pytest.raises(UserError, match="named 'a'"):
        check("one/a", "two/a")
    renamed = named_apart([task_of_pair("x:one/a"), task_of_pair("y:two/a"), task_of_pair("z:b")])
    assert [task.name for task in renamed] == ["one/a", "two/a", "b"]
    with pytest.raises(UserError, match="directory of adapter 'a'"):
        check_apart([task_of_pair("x:a"), task_of({"data": "y", "checkpoint": "./a", "name": "b"}, "b")])
    with pytest.raises(UserError, match="is inside another adapter's directory"):
        check("one/a", "one/a/last")
    check("one/a", "one/b")


@pytest.mark.parametrize(
    ("options", "said"),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def standing(slot: int, now: float | None = None, start: float | None = None) -> Standing:
    return Standing(slot, RunState(last_eval_loss=now, first_eval_loss=start))


def test_recorded_paths_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = tmp_path / "began"
    (began / "sft").mkdir(parents=True)
    for name in ("rows.jsonl", "held.jsonl"):
        (began / name).touch()
    options = {"objective": "dpo", "eval_data": "held.jsonl", "init_adapter": "sft", "reference_adapter": "sft"}
    task = task_of({"data": "rows.jsonl", "checkpoint": str(began / "out" / "a"), **options}, "a")
    request = {"directory": str(began), "adapters": request_of([task], began / "out")}
    monkeypatch.chdir(tmp_path)
    [found] = tasks_of_request(request, began / "out")
    assert found.data == str(began / "rows.jsonl")
    paths = {name: str(began / options[name]) for name in ("eval_data", "init_adapter", "reference_adapter")}
    assert found.options == options | paths


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
    taken = [policy.choose(measured)[0] for _ in range(60)]
    assert set(taken) == {0, 1, 2}
    for slot in (0, 2):
        turns = [i for i, chosen in enumerate(taken) if chosen == slot]
        assert max(b - a for a, b in pairwise(turns)) <= PATIENCE * 3 + 2
    assert taken.count(1) > 40


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_goes_on_where_it_was(name: str) -> None:
    live = [standing(slot, 1.0 + slot, 2.0) for slot in range(3)]
    policy = make_policy(name)
    for _ in range(5):
        policy.choose(live)
    again = make_policy(name, policy_state(policy))
    assert [again.choose(live) for _ in range(30)] == [policy.choose(live) for _ in range(30)]
