"""Options in Python and in files: other programs' names, and messages that call options as they were given there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, write_rows

import wgpu_lora
from wgpu_lora.errors import UserError
from wgpu_lora.train.adapter_tasks import task_of
from wgpu_lora.train.option_types import Range
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.resolve_options import resolve_options

POSITIONS = 128  # of the models among the fixtures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_4bit": True}, r"^finetune\(\): load_in_4bit is .* \(base_dtype selects another type\)\.$"),
        ({"bf16": True}, r"compute_dtype='bf16' rounds activations"),
        ({"lr": 1, "learning_rate": 2}, r"^finetune\(\): lr and learning_rate are the same option"),
        ({"rank": 0}, r"^lora_r must be greater than 0, not 0\.$"),
        ({"lora_dropout": 1.0}, r"^lora_dropout must be at least 0 and less than 1, not 1\.0\.$"),
        ({"target_modules": ["x"]}, r"^target_modules has no 'x'"),
        ({"max_length": 1024}, rf"^max_length=1024 is more than this model's {POSITIONS} positions: lower it to"),
        ({"resume_from_checkpoint": True}, r"resume_from_checkpoint is resume: "),
        ({"output_dir": "nowhere", "resume": True}, r"start without resume\.$"),
        ({"memory_budget": "1KB"}, r"the budget is 1,000 bytes \(memory_budget\): "),
    ],
)
def test_python_names_its_own_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    data = {} if "resume" in options else {"data": write_rows(tmp_path / "rows.jsonl"), "model": QWEN2}
    with pytest.raises(UserError, match=message):
        wgpu_lora.finetune(**{"output": tmp_path / "out"} | data if "output_dir" not in options else {}, **options)


def test_files_name_their_own_keys(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('micro_batch_size = 4\nnum_epochs = 2\nsequence_len = 64\n"lora-alpha" = 8\n')
    args, _ = resolve_options({}, str(recipe), "Here")
    assert (args.per_device_train_batch_size, args.num_train_epochs, args.max_length, args.lora_alpha) == (4, 2, 64, 8)
    for text, message in (
        ("lora_r = 0", r"^The recipe .*r\.toml: 'lora_r' must be greater than 0, not 0\.$"),
        ("lr = 1\nlearning_rate = 1", r"^The recipe .*: 'lr' and 'learning_rate' are the same option"),
        ("load_in_4bit = true", r"^The recipe .*: 'load_in_4bit' is not needed"),
    ):
        recipe.write_text(text)
        with pytest.raises(UserError, match=message):
            resolve_options({}, str(recipe), "Here")
    own = {"data": "a", "checkpoint": "c/d"}
    task = task_of({"data": "a", "output_dir": "c/d", "lora_rank": 2, "num_epochs": 3, "lr": 1}, "Adapter 1")
    assert (task.checkpoint, task.name) == ("c/d", "d")
    assert dict(task.options) == {"lora_r": 2, "num_train_epochs": 3, "learning_rate": 1}
    for keys, message in (
        ({"rank": 1, "lora_r": 1}, "Adapter 1: 'rank' and 'lora_r' are the same key"),
        ({"raank": 1}, r"Adapter 1 has an unknown key 'raank': did you mean 'rank'\?"),
    ):
        with pytest.raises(UserError, match=message):
            task_of({**own, **keys}, "Adapter 1")
    with pytest.raises(UserError, match=r"^The adapter d: 'rank' must be greater than 0, not 0\.$"):
        task_of({**own, "r": 0}, "Adapter 1").arguments(TrainingArguments())


def test_ranges_say_what_they_hold() -> None:
    for within, text, rule, fine, wrong in (
        (Range(above=0), "x>0", "must be greater than 0", 1, 0),
        (Range(at_least=0), "x>=0", "must be 0 or more", 0, -1),
        (Range(at_least=2), "x>=2", "must be at least 2", 2, 1),
        (Range(above=0, at_most=1000), "0<x<=1000", "must be greater than 0 and at most 1,000", 1000, 1001),
        (Range(above=0, unset=-1), "x>0", "must be greater than 0", -1, -2),
        (Range(at_least=0, below=2**32, top="2^32"), "0<=x<2^32", "must be at least 0 and less than 2^32", 5, 2**32),
    ):
        assert (str(within), within.rule()) == (text, rule)
        assert within.holds(fine)
        assert not within.holds(wrong)
        assert not within.holds(float("nan"))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant"}, ["warmup_ratio"]),
        ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, ["warmup_steps"]),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, ["warmup_ratio"]),
        ({"num_train_epochs": 3.0, "max_steps": 5}, ["num_train_epochs"]),
        ({"num_train_epochs": 3.0, "target_seconds": 5.0}, ["num_train_epochs"]),
        ({"save_total_limit": 3, "save_steps": 0, "save_minutes": 0.0}, ["save_total_limit"]),
        ({"lr_scheduler_type": "constant", "max_steps": 5, "save_steps": 0}, []),
        ({"warmup_ratio": 0.1, "num_train_epochs": 2.0}, []),
    ],
)
def test_options_that_do_nothing_are_said(given: dict[str, Any], names: list[str]) -> None:
    found = unused_options(given, TrainingArguments(**given))
    assert [text.split()[0] for text in found] == names
    assert all("does nothing: " in text for text in found)
