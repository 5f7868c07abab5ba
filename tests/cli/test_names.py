"""Names that people type on the command line: other programs' options and commands, help, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from support.cli import QWEN2, Run, write_rows

import wgpu_lora
from wgpu_lora.cli.app import app, main
from wgpu_lora.cli.parameters import MOST_USED
from wgpu_lora.errors import UserError
from wgpu_lora.models.export.adapter_merge import DTYPES
from wgpu_lora.models.export.gguf_export import FILE_TYPES
from wgpu_lora.names import choices
from wgpu_lora.names.aliases import aliases_of
from wgpu_lora.names.foreign_options import ALIASES, COMMANDS, REFUSED
from wgpu_lora.train.adapter_tasks import task_of
from wgpu_lora.train.option_types import Range
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.resolve_options import resolve_options

POSITIONS = 128  # of the models among the fixtures
OPTIONS = set(TrainingArguments.__dataclass_fields__)


def commands() -> dict[str, set[str]]:
    """Every command of the root -> its options."""
    group: Any = typer.main.get_command(app)
    options = {}
    for name, command in group.commands.items():
        flat = [p for c in getattr(command, "commands", {"": command}).values() for p in c.params]
        options[name] = {opt[2:].replace("-", "_") for p in flat for opt in p.opts if opt.startswith("--")}
    return options


# -- the tables --------------------------------------------------------------------------------------------------------


def test_the_tables_agree_with_the_commands() -> None:
    """Nothing has two meanings, and what a sentence or an alias speaks of is there."""
    here = commands()
    everywhere = set().union(*here.values()) | {"checkpoint"}
    aliases = [name for names in ALIASES.values() for name in names.split()]
    refused = {name for _, names in REFUSED for name in names.split()}
    foreign = [name for names in COMMANDS for name in names.split()]
    for names in (aliases, foreign):
        assert not [name for name, count in Counter(names).items() if count > 1]
    assert not set(aliases) & refused
    assert not OPTIONS & {*aliases, *refused} - {"output"}  # an adapter's table calls it checkpoint
    assert {option for options in ALIASES for option in options} <= everywhere
    for text, _ in REFUSED:
        assert set(re.findall(r"\{(\w+)", text)) <= everywhere, text
    assert {command.split()[0] for command in COMMANDS.values()} <= here.keys()


def test_an_alias_has_the_type_of_its_option() -> None:
    """In Python as on the command line: a switch stands for a switch, and so on (they are the same parameter)."""
    for alias, option in aliases_of(OPTIONS).items():
        value = getattr(TrainingArguments(), option)
        if value is not None:
            assert getattr(from_values({alias: value}, "Here"), option) == value


def test_choices_are_those_that_are_there() -> None:
    assert tuple(DTYPES) == choices.MERGED_DTYPES
    assert set(FILE_TYPES) == set(choices.GGUF_TYPES)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("finetune --lr -1", "--learning-rate must be 0 or more, not -1.0."),
        ("finetune --learning_rate -1", "--learning-rate must be 0 or more, not -1.0."),
        ("plan --max_seq_length 1", "--max-length must be at least 2, not 1."),
        ("finetune --iters 0", "--max-steps must be greater than 0, not 0."),
        ("finetune --lora_rank x", "--lora-r must be a number, not 'x'."),
        ("finetune --rank 1.5", "--lora-r must be a whole number, not '1.5'."),
        ("web demo --port 99999", "Invalid value for '--port'"),
        ("finetune --warmup_steps -2", "--warmup-steps must be 0 or more, not -2."),
        ("finetune --lr 1 --learning-rate 2", "--lr and --learning-rate are the same option: leave one out."),
        ("finetune --learning-rate 2 --lr 1", "--learning-rate and --lr are the same option: leave one out."),
        ("finetune --no-sample-packing --no-packing", "--sample-packing and --packing are the same option"),
        ("finetune --load_in_4bit", "--load-in-4bit is not needed: the base is NF4 by default"),
        ("generate --load_in_4bit", "--load-in-4bit is not needed: the base is NF4 by default"),
        (
            "finetune --bf16 True",
            "and --base-dtype sets the type of the frozen weights.",
        ),
        (
            "finetune --optim=adafactor",
            "--optim must be one of adamw, adamw_8bit, adamw_bf16, lion, lion_8bit, muon, sgd, not adafactor.",
        ),
        ("finetune --adafactor", "--adafactor does not exist here: --optim selects the optimizer"),
        ("finetune --optim_args=x=1", "--optim-args: --optim adamw has no option 'x' of its own: it has none"),
        ("finetune --betas 0.9", "--betas is --adam-beta1 and --adam-beta2."),
        ("finetune --beta2 1", "--adam-beta2 must be at least 0 and less than 1, not 1.0."),
        ("finetune --use_wandb", "--use-wandb does not exist here: --report-to wandb, tensorboard or"),
        ("finetune --eval_strategy steps", "every --eval-steps steps."),
        ("finetune --use-peft --mask-prompt", "--use-peft is not needed: --train lora is the default"),
        ("finetune --warmup 3", "did you mean --warmup-ratio or --warmup-steps?"),
        ("finetune --learning-rte 3", "No such option: --learning-rte; did you mean --learning-rate?"),
        ("finetune --eval_batch_size 2", "--eval-batch-size is not needed: held-out rows are packed"),
        (
            "finetune --train_on_inputs True",
            "is --no-completion-only-loss: by default only the answers",
        ),
        ("trian", "No such command 'trian': use 'wgpu-lora finetune'."),
        ("export ollama", "No such command 'ollama': choose one of gguf, web"),
        ("finetune --zork", "No such option: --zork; 'wgpu-lora finetune --help' lists the options."),
        ("finetune -lr 3", "No such option: -lr; options start with two dashes, as in --lr."),
        ("finetune --packing=False", "--packing takes no value: give --packing or --no-packing."),
        ("generate --json=1", "--json takes no value: give --json or leave it out."),
        ("finetune rows.jsonl", "did you mean --data rows.jsonl?"),
        ("finetune --data a.jsonl b.jsonl", "--data takes one value, and already is a.jsonl."),
        ("finetune --lora_target_modules q_proj v_proj", "did you mean --target-modules q_proj,v_proj?"),
        (
            "finetune --fp16 True --lr 1 --logging_dir=x --use_peft",
            "frozen weights. --logging-dir does not exist here",
        ),
        ("finetune --fp16 True --lr 1 --logging_dir=x --use_peft", "plots them. --use-peft is not needed"),
        ("evaluate --lr rows.jsonl", "No such option: --lr"),
        ("evaluate rows.jsonl", "did you mean --data rows.jsonl?"),
        ("evaluate --max-length 3", "Missing option '--data'."),
        ("generate words", "did you mean --prompt words?"),
        ("finetune --data a --data b", "--data takes one value, not both a and b: leave one out."),
        ("finetune --resume .", "did you mean --output .?"),
        ("bench --brick rope compare a", "'wgpu-lora bench' was given --brick and the command compare: leave one out."),
        ("bench --brick rope zork", "'zork' belongs to no option of 'wgpu-lora bench bricks'"),
        ("finetune --data x word", "'word' belongs to no option of 'wgpu-lora finetune'"),
        ("--model x", "--model comes after a command, such as 'wgpu-lora finetune --model ...'."),
        ("--zork", "No such option: --zork"),
        ("server", "use 'wgpu-lora serve'"),
        ("train", "No such command 'train': use 'wgpu-lora finetune'."),
        ("dpo", "No such command 'dpo': use 'wgpu-lora finetune --objective dpo'."),
        ("grpo", "No such command 'grpo': use 'wgpu-lora finetune --objective grpo'"),
        ("fuse", "use 'wgpu-lora merge'"),
        ("finetun", "did you mean 'wgpu-lora finetune'?"),
        ("zork", "No such command 'zork': choose one of info, "),
        ("export", "'wgpu-lora export' needs a command: gguf"),
        ("finetune --dat x", "did you mean --data?"),
        ("finetune --learn 1", "did you mean --learning-rate?"),
    ],
)
def test_what_is_said(run: Run, line: str, message: str) -> None:
    assert message in run(*line.split()).refusal()


def test_other_names_and_true_or_false_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[TrainingArguments] = []

    class Reached(Exception):
        pass

    def stop(args: TrainingArguments, **_: Any) -> None:
        calls.append(args)
        raise Reached

    monkeypatch.setattr("wgpu_lora.train.prepare_job.prepare_job", stop)
    line = "plan --data x --model_name_or_path m --epochs 2 --lr=1e-3 --batch_size 3 --packing False --use_rslora true"
    with pytest.raises(Reached):
        main([*line.split(), "--grad-checkpoint", "--output_dir", "--o_dd", "--no-shuffle", "false"])
    (args,) = calls
    assert (args.model, args.num_train_epochs, args.learning_rate) == ("m", 2.0, 1e-3)
    assert (args.per_device_train_batch_size, args.packing, args.use_rslora) == (3, False, True)
    assert (args.gradient_checkpointing, args.output, args.shuffle) == (True, "--o_dd", True)


def test_usage_has_arguments_in_capitals(run: Run) -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for words in [[name], *([name, sub] for sub in getattr(command, "commands", ()))]:
            (usage,) = re.findall(r"Usage: wgpu-lora [a-z -]+([^a-z{}]*)\n", run(*words, "--help").output())
            assert usage.startswith("[OPTIONS]")


def test_help_starts_with_what_people_change(
    capsys: pytest.CaptureFixture[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("finetune", "plan"):
        short = run(name, "--help").output()
        assert len(MOST_USED) == 10
        listed = re.findall(r"^  --([a-z-]+)", short, re.M)
        own, listed = listed[: listed.index("model")], listed[listed.index("model") :]
        assert listed == [n.replace("_", "-") for n in MOST_USED] + ["help-all"]
        assert bool(own) == (name == "plan"), own  # what a command has beside the options of finetune comes first
        whole = run(name, "--help-all").output()
        assert all(f"--{option.replace('_', '-')}" in whole for option in OPTIONS | {"recipe", "adapters"})
        assert "nf4|bf16|f16|f32" in whole
        assert re.search(r"--lora-dropout.*\n?.*\[0<=x<1\]", whole)
        assert max(map(len, whole.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("finetune --base-dtype ", "auto nf4 bf16 f16 f32 lut2 lut3 lut4 int8 gguf"),
        ("finetune --base_dtype b", "bf16"),
        ("finetune --lora-r ", "16"),
        (
            "finetune --recipe wall",
            "wallclock-0.5b-15m wallclock-0.5b-30m wallclock-0.5b-60m wallclock-7b-15m"
            " wallclock-7b-30m wallclock-7b-3m wallclock-7b-h100",
        ),
        ("finetune --model de", "demo"),
        ("finetune --target-modules q_proj,v", "q_proj,v_proj"),
        ("finetune --schedule r", "round-robin"),
        ("export gguf --quantize q4", "q4_k_m q4_1 q4_0"),
        ("bench --brick multi", "multi_adapter_memory multi_adapter_step"),
        ("bench --sh", "--shape"),
        ("bench com", "compare"),
        ("bench max-batch --shape qwen3-", "qwen3-0.6b qwen3-8b qwen3-1.7b"),
        ("fi", "finetune"),
    ],
)
def test_completion(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["wgpu-lora", *line.split(" ")]
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_WGPU_LORA_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == expected.split()


def test_bash_completes_without_the_gpu_library(tmp_path: Path) -> None:
    """In a child, by the script that is printed for bash."""
    program = tmp_path / "wgpu-lora"
    program.write_text(
        f"#!{sys.executable}\nimport atexit, sys\nfrom wgpu_lora.__main__ import main\n"
        "atexit.register(lambda: print('wgpu' in sys.modules, file=sys.stderr))\nmain()\n"
    )
    program.chmod(0o755)
    script = (
        'eval "$(_WGPU_LORA_COMPLETE=source_bash wgpu-lora 2>/dev/null)"\n'
        "COMP_WORDS=(wgpu-lora finetune --on-overflow d); COMP_CWORD=3; _wgpu_lora_completion wgpu-lora\n"
        'echo "${COMPREPLY[*]}"'
    )
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(wgpu_lora.__file__).parent.parent)}
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | here)
    assert (process.stdout.split(), process.stderr.split()) == (["drop"], ["False"]), process.stderr


# -- options in Python and in files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_4bit": True}, r"^finetune\(\): load_in_4bit is .* \(base_dtype selects another type\)\.$"),
        ({"bf16": True}, r"bf16 does not exist here: sums and adapters are float32; compute_dtype rounds"),
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
    ("options", "names"),
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
def test_options_that_do_nothing_are_said(options: dict[str, Any], names: list[str]) -> None:
    notes = unused_options(options, TrainingArguments(**options))
    assert [text.split()[0] for text in notes] == names
    assert all("does nothing: " in text for text in notes)
