"""Every option of every command of `wgpu-lora bench`, and with every brick: it acts, or it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from support.bench import mini

from wgpu_lora.bench.brick import Context
from wgpu_lora.bench.bricks import WORKLOADS, serving_bricks
from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.cli import app, main
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
    record = {"rows": [], "runs": [], "summary": {"gate": None}, "projections": [], "pairs": []}
    record |= {"best": {"fastest": None}, "fastest": {"batch": 1, "accumulation": 1}}

    def note(*arguments: Any, **named: Any) -> Any:
        found.append(([a for a in arguments if not isinstance(a, Events)], {**named, "said": current_remarks()}))
        return record

    def writer(path: str | None, option: str = "--json") -> Any:
        note(path)
        return nullcontext(SimpleNamespace(text=lambda text: None))

    command = import_module("wgpu_lora.cli.bench.bricks")  # the package has the group by this name
    monkeypatch.setattr(command, "_measure", lambda *arguments: note(*arguments) and 0)
    monkeypatch.delenv("WGPU_LORA_NO_TUNE", raising=False)
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: selector)
    monkeypatch.setattr("wgpu_lora.bench.brick_results.Writer", writer)
    monkeypatch.setattr("wgpu_lora.bench.training_runs.written", lambda found: "")
    monkeypatch.setattr("wgpu_lora.bench.batch_search.find_max_batch", lambda *a, **k: note(*a, **k) | {"summary": []})
    for name in ("training_runs.run_training", "batch_search.search_pairs", "training_step.chosen_model"):
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
