"""Whole runs measured again and again, and the search for the largest batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from support.bench import MINI_ROW
from support.cli import QWEN2, SMALL, Run, commands, flags, write_rows
from support.events import hearing

from wgpu_lora.bench import training_runs
from wgpu_lora.bench.batch_search import pairs_of, search_pairs
from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.larger_models import grade, operations
from wgpu_lora.bench.timing import spread
from wgpu_lora.bench.training_runs import WARMUP, Work, run_training
from wgpu_lora.bench.training_step import TrainingStep, chosen_model
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import Budget
from wgpu_lora.models import published_shapes
from wgpu_lora.models.published_shapes import cut, shape_config
from wgpu_lora.train.options.training_arguments import TrainingArguments

SIZES = {"max_length": 16, "per_device_train_batch_size": 2, "lora_r": 4}


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(published_shapes._ROWS, "mini", MINI_ROW)
    return "mini"


# -- spread ------------------------------------------------------------------------------------------------------------


def test_spread_is_the_samples():
    statistics = spread([2.0, 4.0, 6.0, 8.0])
    assert statistics["mean"] == statistics["median"] == 5.0
    assert (statistics["min"], statistics["max"]) == (2.0, 8.0)
    assert statistics["variance"] == pytest.approx(20 / 3)
    assert statistics["cv"] == pytest.approx((20 / 3) ** 0.5 / 5)


# -- projections -----------------------------------------------------------------------------------------------------


def test_a_projection_is_the_plan_and_the_counted_operations(device: Device):
    work = Work(None, "mini", 1, SIZES | {"max_steps": WARMUP + 1})
    report = run_training(work, 1, opened=device, shapes=("mini", "tiny-qwen3"))
    measured, same, larger = report["projections"]
    # The measured model itself, but for its other two layers: a layer's share of the operations is known.
    one_layer, three = (operations(published_shapes.shape_config("mini", layers), 4, 16.0) for layers in (1, 3))
    assert same["times_the_operations"] == pytest.approx(three / one_layer)
    run = report["runs"][0]
    assert same["samples_per_second"] == pytest.approx(run["samples_per_second"] * one_layer / three)
    assert same["seconds"] == pytest.approx(run["seconds"] * three / one_layer)
    # Rows of this recipe are cut at 16 tokens, so the plan is that of the step itself.
    model = chosen_model(None, "mini", None, device)
    assert same["peak_planned"] == TrainingStep(model, TrainingArguments(**SIZES)).session.memory().peak
    assert (measured["grade"], measured["peak_planned"], measured["shape"]) == ("measured", run["peak_planned"], "mini")
    assert measured["samples_per_second"] == run["samples_per_second"]
    assert same["grade"] == "excellent"
    assert larger["peak_planned"] > same["peak_planned"]
    assert larger["times_the_operations"] > same["times_the_operations"]


def test_grades_are_shares_of_the_budget():
    peaks = (0, 500, 501, 750, 900, 1000, 1001)
    grades = ["excellent", "excellent", "good", "good", "possible", "tight", "does not fit"]
    assert [grade(peak, 1000) for peak in peaks] == grades
    assert (grade(None, 1000), grade(1, None)) == ("does not fit", "not known")


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_runs_on_a_shape_are_alike_and_counted(device: Device):
    work = Work(None, "mini", 1, SIZES | {"max_steps": WARMUP + 2})
    noted: list[dict[str, Any]] = []
    before = device.allocated  # by other tests
    report = run_training(work, 2, hearing(measured=noted.append), device)
    assert noted == [report["header"], *report["runs"], report["summary"]]
    assert (report["header"]["work"]["layers"], report["header"]["device"]["name"]) == (1, device.info.name)
    for run in report["runs"]:
        assert (run["steps"], run["stop_reason"]) == (2, "max steps")
        speeds = {"tokens_per_second": 16, "trained_tokens_per_second": 15, "samples_per_second": 1}
        for name, tokens in speeds.items():
            assert run[name] == pytest.approx(tokens * 2 / run["step_seconds"]["mean"])
        assert run["seconds"] >= 2 * run["step_seconds"]["mean"]
        assert run["peak_allocated"] - before == run["peak_planned"]
    assert report["summary"]["spread"]["final_loss"]["variance"] == 0  # the same bits, so nothing else got in


def test_a_recipe_is_run_elsewhere(device: Device, tmp_path: Path):
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, -100]}] * 4
    values = SMALL | {"model": QWEN2, "data": str(write_rows(tmp_path / "rows.jsonl", rows))}
    values |= {"output": str(tmp_path / "mine"), "packing": False}
    del values["gradient_accumulation_steps"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    report = run_training(Work(str(recipe), options={"max_steps": WARMUP + 1}), 1, opened=device)
    (run,) = report["runs"]
    # The header has the batches that were trained, here chosen for small data, not the recipe's.
    assert report["header"]["work"]["options"]["gradient_accumulation_steps"] == 1
    assert run["tokens_per_second"] == pytest.approx(5 * run["samples_per_second"])
    assert run["trained_tokens_per_second"] == pytest.approx(2 * run["samples_per_second"])
    assert report["summary"]["spread"]["seconds"]["variance"] is None
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"shape": "mini", "recipe": "demo"}, "--recipe and --shape are both given"),
        ({"layers": 2}, "--layers goes with --shape"),
        ({"options": {"max_steps": WARMUP}}, f"give at least {WARMUP + 1}"),
        ({"shape": "zork"}, "The shape zork is not known: choose one of "),
        ({"recipe": "zork"}, "The recipe zork does not exist"),
        ({"shape": "mini", "options": {"max_length": 100}}, "--tokens 100 is not possible"),
        ({"shape": "mini", "options": {"per_device_train_batch_size": 0}}, "--batch must be greater than 0"),
        (
            {"shape": "mini", "options": {"max_length": 16, "lora_r": 10**9}},
            "--rank 1000000000 needs .* lower it to at most",
        ),
        ({"recipe": "demo", "options": {"compute_dtype": "zork"}}, "--compute-dtype must be one of"),
    ],
)
def test_work_that_cannot_be(device: Device, work: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        run_training(Work(**work), opened=device)


def test_too_few_steps_are_refused_before_training(device: Device, tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    data = write_rows(tmp_path / "rows.jsonl")
    options = "num_train_epochs = 1\nmax_length = 16\npacking = true\ngradient_accumulation_steps = 4"
    recipe.write_text(f'model = "{QWEN2}"\ndata = "{data}"\n{options}\n')
    with pytest.raises(UserError, match="This training has 1 step, of which the first 2 are warm-up"):
        run_training(Work(recipe=str(recipe)), opened=device)


def test_a_run_that_fails_is_reported_beside_the_others(device: Device, monkeypatch: pytest.MonkeyPatch):
    """And the gate needs two runs that succeeded."""
    failure, timed = UserError("the device was lost"), training_runs.time_run
    work = Work(None, "mini", 1, SIZES | {"num_train_epochs": 0.3})
    monkeypatch.setattr(training_runs, "time_run", Mock(side_effect=[failure, DEFAULT], wraps=timed))
    report = run_training(work, 2, opened=device, max_spread=0.5)
    ran = [(run["error"], run["done_steps"], run["planned_steps"]) for run in report["runs"]]
    assert ran == [("the device was lost", 0, 3), (None, 3, 3)]  # 0.3 epochs of 10 steps
    summary, peak = report["summary"], report["runs"][1]["peak_planned"]
    assert (summary["errors"], summary["steps"]) == (["the device was lost"], {"done": 3, "planned": 6})
    assert summary["gate"] == {"limit": 0.5, "spread": 0.0, "passed": False}
    memory = summary["memory"]
    assert (memory["peak"], memory["share"]) == (peak, peak / memory["total"])
    monkeypatch.setattr(training_runs, "time_run", Mock(side_effect=failure))
    with pytest.raises(UserError, match="the device was lost"):
        run_training(work, 2, opened=device)


def test_pairs_of_the_same_product_are_timed(device: Device, monkeypatch: pytest.MonkeyPatch):
    assert pairs_of(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    work = Work(None, "mini", 1, SIZES | {"gradient_accumulation_steps": 1, "max_steps": WARMUP + 1})
    report = search_pairs(work, 1, opened=device)
    assert [(p["batch"], p["accumulation"], p["status"]) for p in report["pairs"]] == [(1, 2, "OK"), (2, 1, "OK")]
    assert report["fastest"] is max(report["pairs"], key=lambda pair: pair["samples_per_second"])
    small, large = (pair["peak_planned"] for pair in report["pairs"])
    assert small < large
    monkeypatch.setattr("wgpu_lora.bench.batch_search.budget_bytes", lambda *arguments: Budget(large - 1, "a test"))
    report = search_pairs(work, 1, opened=device)
    assert [(p["status"], p["why"]) for p in report["pairs"]] == [("OK", None), ("OOM", "more than the budget")]
    assert report["fastest"]["batch"] == 1


@pytest.fixture
def command(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("wgpu_lora.bench.training_runs.Device", lambda selector: device)
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: device)
    sizes = flags(shape="mini", layers=1, tokens=16, batch=2, rank=4, max_steps=3)
    return commands(capsys, "bench", "training", *sizes)


def test_command_writes_lines(command: Run, tmp_path: Path):
    result = command("--repeat", 1, "--json", tmp_path / "found.json")
    lines = [json.loads(line) for line in (tmp_path / "found.json").read_text().splitlines()]
    assert lines[0]["schema"] == "wgpu-lora-bench-training/2"
    assert [line["kind"] for line in lines] == ["header", "run", "summary"]
    assert all(text in result.out for text in ("shape mini, 1 layer;", "one run", "3 of 3 steps done, no errors"))
    result = command("--max-spread", "1e-7%", "--summary", tmp_path / "found.md")
    assert (result.code, "more than the limit of 1e-07%" in result.out) == (1, True)
    text = (tmp_path / "found.md").read_text()
    assert text.startswith("# Training benchmark: shape mini, 1 layer\n\n- Device: ")
    assert all(part in text for part in ("- Spread: the runs vary by ", "\n| samples/s | "))
    assert "fastest   --batch " in command("--search-batch").out
    assert "grades    share of the budget" in command("--repeat", 1, "--project").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-spread 150%", "--max-spread must be a share between 0 and 1, such as 1% or 0.01, not '150%'"),
        ("--max-spread 1% --repeat 1", "--max-spread compares runs: give --repeat 2 or more"),
        ("--epochs 1", "--epochs and --max-steps are both given"),
        ("--search-batch --project", "--project does nothing with --search-batch: leave it out."),
        ("--repeat 0", "--repeat must be at least 1, not 0"),
        ("--json /nowhere/x.json", "The directory /nowhere of --json does not exist"),
    ],
)
def test_mistakes(command: Run, words: str, message: str):
    result = command(*words.split())
    assert (result.code, message in result.err) == (2, True)


def test_training_on_delta_nets_counts_the_recurrence_in_proportion_to_tokens() -> None:
    config = cut(shape_config("qwen3.5-0.8b"), 3)  # without attention
    short, long = (operations(config, 16, tokens) for tokens in (1000.0, 2000.0))
    head = 4 * config.vocab_size * config.hidden_size
    assert long + head == pytest.approx(2 * (short + head), rel=1e-12)
    n, d = numbers_of(config), config.hidden_size
    products = 4 * n["linear_weights"] - 2 * d * n["first_outputs"] + 6 * 16 * n["linear_sizes"] - 2 * 16 * d * 4
    assert short == pytest.approx(1000 * (products + 18 * 3 * 16 * 128 * 128) + 999 * head, rel=1e-12)
