"""Every option of every command of `wgpu-lora bench`, and with every brick: it acts, or it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from support.bench import mini

from wgpu_lora.bench.brick import Context
from wgpu_lora.bench.bricks import WORKLOADS, serving_bricks
from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.cli import app, main
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.track.run_recorder import current_remarks

BENCH: Any = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
COMMANDS = {"bricks": ["--all"], "training": [], "max-batch": []}  # with options, and what else they need


def options(command: str) -> dict[str, Any]:
    return {p.name: p for p in BENCH.commands[command].params if p.name != "help"}


def sample(option: Any) -> list[str]:
    """The option with a value that it does not have by default."""
    if option.is_flag:
        return [(option.secondary_opts or option.opts)[0]]
    values = {"shape": "tiny-qwen3", "base_dtype": "bf16", "compute_dtype": "f16"}
    values |= {"max_spread": "1%"}
    return [option.opts[0], values.get(option.name, "7")]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the work of each command, none of which is done."""
    found: list[Any] = []

    def note(*arguments: Any, **named: Any) -> Any:
        found.append(([a for a in arguments if not isinstance(a, Events)], {**named, "said": current_remarks()}))
        return {"rows": [], "runs": [], "summary": [], "projections": [], "best": {"fastest": None}}

    def training(*arguments: Any, **named: Any) -> Any:
        return note(*arguments, **named) | {"summary": {"gate": None}}

    def pairs(*arguments: Any, **named: Any) -> Any:
        return note(*arguments, **named) | {"pairs": [], "fastest": {"batch": 1, "accumulation": 1}}

    def writer(path: str | None, option: str = "--json") -> Any:
        note(path)
        return nullcontext(SimpleNamespace(text=lambda text: None))

    command = import_module("wgpu_lora.cli.bench.bricks")  # the package has the group by this name
    monkeypatch.setattr(command, "_measure", lambda *arguments: note(*arguments) and 0)
    monkeypatch.delenv("WGPU_LORA_NO_TUNE", raising=False)
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: selector)
    monkeypatch.setattr("wgpu_lora.bench.brick_results.Writer", writer)
    monkeypatch.setattr("wgpu_lora.bench.training_runs.written", lambda found: "")
    monkeypatch.setattr("wgpu_lora.bench.training_runs.run_training", training)
    monkeypatch.setattr("wgpu_lora.bench.batch_search.search_pairs", pairs)
    for name in ("batch_search.find_max_batch", "training_step.chosen_model"):
        monkeypatch.setattr(f"wgpu_lora.bench.{name}", note)
    monkeypatch.setattr(Context, "of", note)
    return found


def run(arguments: list[str], found: list[Any]) -> Any:
    found.clear()
    assert main(["bench", *arguments]) == 0
    return list(found)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_acts(command: str, reached: list[Any]) -> None:
    words = [command, *COMMANDS[command]]
    plain = run(words, reached)
    for name, option in options(command).items():
        if name not in ("brick", "everything", "listing") and (command, name) != ("training", "layers"):
            assert run([*words, *sample(option)], reached) != plain, f"{option.opts[0]} does nothing"


def test_a_recipe_and_a_shape_take_each_their_own(reached: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    on_shape = ["training", "--shape", "tiny-qwen3"]
    plain = run(on_shape, reached)
    for name, option in options("training").items():
        if name in ("recipe", "data", "model"):
            assert main(["bench", *on_shape, *sample(option)]) == 2
            assert option.opts[0] in capsys.readouterr().err
        elif name != "shape":
            assert run([*on_shape, *sample(option)], reached) != plain, f"{option.opts[0]} does nothing"
    assert main(["bench", "training", "--layers", "1"]) == 2
    assert "--layers goes with --shape" in capsys.readouterr().err


def test_a_list_takes_no_option_and_bricks_need_no_name(reached: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in options("bricks").items():
        if name != "listing":
            assert main(["bench", "--list", *sample(option)]) == 2
            err = capsys.readouterr().err
            assert f"{option.opts[0]}" in err
            assert ("does nothing with --list: leave it out." in err) == (name not in ("brick", "everything"))
    assert run(["bricks", "--all"], reached) == run(["--all"], reached)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--training --shape tiny-qwen3 --repeat 3", "training --shape tiny-qwen3 --repeat 3"),
        ("--shape qwen2.5-0.5b --find_max_batch --max-batch 9", "max-batch --shape qwen2.5-0.5b --max-batch 9"),
    ],
)
def test_flags_of_before_are_commands_with_a_note(
    before: str, now: str, reached: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(before.split(), reached) == run(now.split(), reached)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.endswith(f"is now a command: 'wgpu-lora bench {now.split()[0]}'")


def test_help_is_of_bricks_and_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {text} " in out for text in ("--brick", "--all", "--list", "compare", "training", "max-batch"))
    assert not any(flag in out for flag in ("--compare", "--training", "--find-max-batch", "--repeat"))


def test_what_a_training_is_told_reaches_its_options(reached: list[Any], device: Device, tmp_path: Path) -> None:
    told = {"max_length": 48, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 5, "lora_r": 6}
    told |= {"base_dtype": "f32", "compute_dtype": "bf16", "tune": False, "max_steps": 9}
    names = ("--tokens", "--batch", "--accumulation", "--rank", "--base-dtype", "--compute-dtype")
    given = [word for pair in zip(names, told.values(), strict=False) for word in map(str, pair)]
    run(["training", *given, "--no-tune", "--max-steps", "9"], reached)
    (work,) = (argument for arguments, _ in reached for argument in arguments if isinstance(argument, Work))
    assert work.options == told
    for where in ({"shape": "tiny-qwen3", "layers": 1}, {"recipe": "demo"}):
        args, model = prepared(Work(**where, options=told), tmp_path, device)
        assert {name: getattr(args, name) for name in told} == told
        assert model.decoder.base_dtype == "f32"


# -- bricks ------------------------------------------------------------------------------------------------------------


def recorded(device: Device, name: str, layers: int = 1, **changes: Any) -> Any:
    """All that measuring a brick depends on: what is counted, what is allocated, and what is dispatched."""
    context, contract, found = mini(device, layers, brick=name, **changes), load_contract(name), []
    for workload in WORKLOADS[name](context):
        dims = contract.values({**context.keys(), **workload.keys})
        steps = [step for program in workload.programs() for step in program.dispatches]
        calls = [(step.kernel.name, sorted(step.constants.items()), step.present) for step in steps]
        tuned = any(step.kernel.tuning for step in steps) if context.tune else False
        found.append((contract.operations(dims), contract.bytes(dims), workload.nbytes(), calls, tuned))
    return found


@pytest.mark.parametrize("name", brick_names())
def test_a_contract_names_the_options_that_change_it(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(serving_bricks, "PROMPTS", (5, 9))
    changes = {"layers": 2, "tokens": 32, "rank": 8, "base_dtype": "f32", "compute_dtype": "bf16", "tune": True}
    assert tuple(changes) == OPTIONS
    plain = recorded(device, name)
    found = [option for option, value in changes.items() if recorded(device, name, **{option: value}) != plain]
    assert found == list(load_contract(name).options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--brick", "rope", "--rank", "16"], "--rank does nothing with the brick rope: leave it out."),
        (["--brick", "rope", "--retune"], "--retune does nothing with the brick rope: leave it out."),
        (["--brick", "lora_forward", "--no-tune", "--retune"], "--retune does nothing with --no-tune"),
        (
            ["--brick", "ttft", "--brick", "load", "--no-tune", "--tokens", "9"],
            "--tokens and --tune/--no-tune do nothing with the bricks ttft, load: leave them out.",
        ),
        (["--brick", "rope", "--brick", "optimizer", "--compute-dtype", "f32"], "--compute-dtype does nothing with"),
    ],
)
def test_bricks_refuse_what_changes_none_of_them(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        BENCH.main(arguments, standalone_mode=False)
    assert message in str(refused.value)


def test_what_one_brick_of_several_takes_is_taken(reached: list[Any]) -> None:
    assert run(["--brick", "rope", "--brick", "optimizer", "--rank", "4", "--tokens", "16"], reached)


# -- other commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--top-p", "0.9"], "--top-p does nothing at --temperature 0"),
        (["generate", "--prompt", "x", "--temperature", "0", "--top-p", "1", "--top-k", "5"], "--top-p and --top-k do"),
        (["plan", "--schedule", "round-robin"], "--schedule does nothing without --adapters"),
        (["plan", "--batch-tokens", "64"], "--batch-tokens does nothing without --adapters"),
    ],
)
def test_others_refuse_too(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
