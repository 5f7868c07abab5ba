"""Options: one dataclass for the command line, recipes and Python."""

from pathlib import Path

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.memory_leases import Budget
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.train.memory import check_memory, format_bytes
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.resolve_options import find_recipe, read_recipe, recipe_arguments, resolve_options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lerning_rate": 1e-3}, "unknown option 'lerning_rate': did you mean learning_rate?"),
        ({"zzz": 1}, "unknown option 'zzz': help(wgpu_lora.finetune) lists the options."),
        ({"max_steps": "3"}, "max_steps must be a whole number, not '3'"),
        ({"max_steps": True}, "max_steps must be a whole number, not True"),
        ({"packing": 1}, "packing must be true or false"),
        ({"learning_rate": float("nan")}, "learning_rate must be 0 or more, not nan"),
        ({"learning_rate": -1}, "learning_rate must be 0 or more"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs must be greater than 0"),
        ({"adam_epsilon": float("inf")}, "adam_epsilon must be greater than 0 and finite, not inf"),
        ({"target_seconds": 0}, "target_seconds must be greater than 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and less than 1"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"base_dtype": "int5"}, "base_dtype must be one of auto, nf4, bf16, f16, f32, lut2, lut3, lut4, int8, gguf"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "optim_args: nesterov=true needs a momentum"),
        ({"learning_rate": 1e30, "loraplus_lr_ratio": 1e30}, "a learning rate beyond float32's range"),
        ({"target_modules": ""}, "target_modules is empty"),
        ({"memory_budget": "lots"}, "memory_budget must be a size such as 4GiB or 800MB, not lots"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(UserError, match=r"^(Here|[a-z])") as caught:
        from_values(values, "Here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("1.5 gib", 3 << 29), ("800MB", 800_000_000), ("12345", 12345), ("2k", 2000), (None, None)],
)
def test_memory_budgets(text, expected):
    assert TrainingArguments(memory_budget=text).budget() == expected


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({}, 2e-4),
        ({"objective": "sft"}, 2e-4),
        *(({"objective": objective}, 1e-5) for objective in ("dpo", "kto", "orpo", "cpo")),
        ({"objective": "dpo", "learning_rate": 2e-4}, 2e-4),
        ({"objective": "dpo", "learning_rate": 0.0}, 0.0),
        ({"learning_rate": 3e-4}, 3e-4),
    ],
)
def test_an_objective_has_a_rate_of_its_own(values, rate):
    args = from_values(values, "Here")
    assert args.rate == rate
    assert from_values({"objective": "dpo"}, "Here", args).rate == (1e-5 if args.learning_rate is None else rate)
    assert TrainingArguments(**args.as_dict()) == args
    with pytest.raises(UserError, match=r"lr_scheduler_min=1\.0 is more than the peak, learning_rate="):
        from_values({**values, "lr_scheduler_min": 1.0}, "Here")


def test_recipes_win_over_the_objective():
    path = find_recipe("persona-dpo")
    assert recipe_arguments(path).rate == read_recipe(path)["learning_rate"] == 5e-6


def test_what_is_given_wins_over_the_recipe(tmp_path: Path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('learning-rate = 1\nlora_r = 4\ntarget_modules = ["q_proj", "v_proj"]\ndata = "x.jsonl"\n')
    args, path = resolve_options({"lora_r": 8}, str(recipe), "Here")
    assert (args.learning_rate, args.lora_r, args.target_modules, args.data) == (1, 8, "q_proj,v_proj", "x.jsonl")
    assert path == recipe


def test_without_data_and_model_the_demo_recipe_is_used():
    args, path = resolve_options({}, None, "Here")
    assert path == find_recipe("demo")
    assert args.model == "demo"
    assert resolve_options({"data": "x.jsonl"}, None, "Here") == (TrainingArguments(data="x.jsonl"), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a = ", "not valid TOML"), ("[train]\nlora_r = 4", "has a table [train]"), (None, "does not exist")],
)
def test_bad_recipes(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "r.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_recipe(path)
    assert message in str(caught.value)


# -- the memory guard's advice, on a made-up plan: 100 bytes a row, 50 with checkpointing, and a base of 100 or 25 ----


def _peak(args: TrainingArguments, changes: dict) -> int:
    get = {**args.as_dict(), **changes}.get
    row = (50 if get("gradient_checkpointing") else 100) * (get("max_length") or 1024) // 1024
    row -= 20 if get("offload_activations") and get("lora_r") == 4 else 0  # a device with memory of its own
    return (25 if get("base_dtype") in ("auto", "nf4") else 100) + row * get("per_device_train_batch_size")


@pytest.mark.parametrize(
    ("options", "available", "advice"),
    [
        ({}, 825, None),
        ({}, 824, "with --gradient-checkpointing (425 bytes), or with --per-device-train-batch-size 7 (725 bytes)."),
        ({}, 300, "with --per-device-train-batch-size 2 (225 bytes)."),
        (
            {"lora_r": 4},
            665,
            "with --gradient-checkpointing (425 bytes), or with --offload-activations (665 bytes), or with "
            "--per-device-train-batch-size 6 (625 bytes).",
        ),
        ({}, 120, "with --gradient-checkpointing --per-device-train-batch-size 1 (75 bytes)."),
        (
            {"base_dtype": "bf16"},
            825,
            "with --gradient-checkpointing (500 bytes), or with --per-device-train-batch-size 7 (800 bytes), or with "
            "--base-dtype nf4 (825 bytes).",
        ),
        (
            {"base_dtype": "bf16"},
            130,
            "with --gradient-checkpointing --base-dtype nf4 --per-device-train-batch-size 2 (125 bytes).",
        ),
        ({}, 60, "with --gradient-checkpointing --per-device-train-batch-size 1 --max-length 512 (50 bytes)."),
        (
            {"gradient_checkpointing": True},
            27,
            "even with --per-device-train-batch-size 1 --max-length 64 it would need 28 bytes, so lower --lora-r, or "
            "choose a smaller model.",
        ),
    ],
)
def test_advice_names_options_that_fit(options: dict, available: int, advice: str | None):
    args = TrainingArguments(per_device_train_batch_size=8, **options)
    peak = _peak(args, {})
    if advice is None:
        check_memory(peak, 0, Budget(available, "somebody says so"), args, lambda changes: _peak(args, changes))
        return
    with pytest.raises(UserError) as caught, naming(COMMAND_LINE):
        check_memory(peak, 0, Budget(available, "somebody says so"), args, lambda changes: _peak(args, changes))
    assert f"needs {peak:,} bytes of" in str(caught.value)
    assert f"the budget is {available} bytes (somebody says so)" in str(caught.value)
    assert advice in str(caught.value)


def test_readable_sizes():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 29)] == ["0 bytes", "1,023 bytes", "1.5 KiB", "1.5 GiB"]
