"""Every option in every mode of `wgpu-lora bench`, and with every brick: it acts, or it is refused."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.bench import mini

from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.bench.training import Work, _prepared
from wgpu_lora.bench.workload import Context
from wgpu_lora.bench.workloads import WORKLOADS, serving
from wgpu_lora.cli import app, main
from wgpu_lora.cli.bench_modes import TAKES
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device

BENCH: Any = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
OPTION = {p.name: p for p in BENCH.params if p.name != "help"}
MODES = {
    "brick": ["--brick", "train_step"],
    "everything": ["--all"],
    "listing": ["--list"],
    "compare": ["--compare", "old", "new"],
    "training": ["--training"],
    "find_max_batch": ["--find-max-batch"],
}


def sample(option: Any) -> list[str]:
    """The option with a value that it does not have by default."""
    if option.is_flag:
        return [(option.secondary_opts or option.opts)[0]]
    values = {"shape": "tiny-qwen3", "base_dtype": "bf16", "compute_dtype": "f16", "brick": "rope"}
    return [option.opts[0], *[values.get(option.name, "7")] * option.nargs]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the work of each mode, none of which is done."""
    found: list[Any] = []

    def note(*arguments: Any, **named: Any) -> int:
        found.append((arguments, named))
        return 0

    command = import_module("wgpu_lora.cli.bench")  # the package has the function by this name
    for name in ("_measure", "_list", "_compare", "train", "search_batches"):
        monkeypatch.setattr(command, name, note)
    monkeypatch.delenv("WGPU_LORA_NO_TUNE", raising=False)
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: selector)
    monkeypatch.setattr(Context, "of", note)
    return found


def run(arguments: list[str], found: list[Any]) -> Any:
    found.clear()
    assert BENCH.main(arguments, standalone_mode=False) == 0
    return list(found)


def test_the_modes_and_options_are_all_of_them() -> None:
    assert TAKES.keys() == MODES.keys()
    assert set().union(*TAKES.values()) | TAKES.keys() == OPTION.keys()


@pytest.mark.parametrize("mode", MODES)
def test_an_option_acts_or_is_refused(mode: str, reached: list[Any]) -> None:
    plain = run(MODES[mode], reached)
    for name, option in OPTION.items():
        if name == mode:
            continue
        arguments = [*MODES[mode], *sample(option)]
        if name in TAKES[mode]:
            if (mode, name) != ("training", "layers"):  # of a shape alone, see below
                assert run(arguments, reached) != plain, f"{arguments} does nothing"
            continue
        with pytest.raises(UserError) as refused:
            run(arguments, reached)
        wanted = "exactly one of" if name in MODES else f"does nothing with {MODES[mode][0]}: leave it out."
        assert wanted in str(refused.value)
        assert option.opts[0] in str(refused.value)


def test_a_recipe_and_a_shape_take_each_their_own(reached: list[Any]) -> None:
    """What both modes of --training take is in the test above; of what contradicts, the refusal names the option."""
    on_shape = ["--training", "--shape", "tiny-qwen3"]
    plain = run(on_shape, reached)
    for name in TAKES["training"] - {"shape"}:
        arguments = [*on_shape, *sample(OPTION[name])]
        if name in ("recipe", "data", "model"):
            with pytest.raises(UserError, match=OPTION[name].opts[0]):
                run(arguments, reached)
        else:
            assert run(arguments, reached) != plain, f"{arguments} does nothing"
    with pytest.raises(UserError, match="--layers goes with --shape"):
        run(["--training", "--layers", "1"], reached)


def test_a_default_that_is_given_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--all", "--repeat", "2", "--max-batch", "3"]) == 2
    assert "--repeat and --max-batch do nothing with --all: leave them out." in capsys.readouterr().err


def test_what_a_training_is_told_reaches_its_options(device: Device, tmp_path: Path) -> None:
    told: dict[str, Any] = {"tokens": 48, "batch": 3, "accumulation": 5, "rank": 6, "base_dtype": "f32"}
    told |= {"compute_dtype": "bf16", "tune": False, "max_steps": 9}
    names = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "lora_r", "base_dtype",
             "compute_dtype", "tune", "max_steps")  # fmt: skip
    for where in ({"shape": "tiny-qwen3", "layers": 1}, {"recipe": "demo"}):
        args, model = _prepared(Work(**where, **told), tmp_path, device)
        assert [getattr(args, name) for name in names] == list(told.values())
        assert model.decoder.base_dtype == "f32"


# -- bricks ------------------------------------------------------------------------------------------------------------


def recorded(device: Device, name: str, layers: int = 1, **changes: Any) -> Any:
    """All that measuring a brick depends on: what is counted, what is allocated, and what is dispatched."""
    context, contract, found = mini(device, layers, **changes), load_contract(name), []
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
    monkeypatch.setattr(serving, "PROMPTS", (5, 9))
    changes = {"layers": 2, "tokens": 32, "rank": 8, "base_dtype": "f32", "compute_dtype": "bf16", "tune": True}
    assert tuple(changes) == OPTIONS
    plain = recorded(device, name)
    found = [option for option, value in changes.items() if recorded(device, name, **{option: value}) != plain]
    assert found == list(load_contract(name).options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--brick", "rope", "--rank", "16"], "--rank does nothing with the brick rope: leave it out."),
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
