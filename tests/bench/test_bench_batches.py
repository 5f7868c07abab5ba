"""The search for the largest batch: as far as memory and the device go, and what of it runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.bench import MINI_ROW
from support.events import hearing

from wgpu_lora.bench import batch_search as search
from wgpu_lora.bench.batch_search import Batches, find_max_batch, planned_batch
from wgpu_lora.bench.training_step import TrainingStep, chosen_model, largest
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models import published_shapes
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.options.training_arguments import TrainingArguments

ARGS = TrainingArguments(max_length=16, lora_r=4)
COMMAND = ["bench", "max-batch", "--shape", "mini", "--layers", "1", "--tokens", "16", "--rank", "4"]


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(published_shapes._ROWS, "mini", MINI_ROW)


def step_of(model: LoadedModel, rows: int) -> TrainingStep:
    return TrainingStep(model, Batches(ARGS).of(rows, False))


@pytest.mark.parametrize("most", [0, 1, 2, 7, 64])
def test_largest_finds_every_edge(most: int):
    def fits(size: int, edge: int) -> bool:
        if size > edge + 3:
            raise UserError("too large to record")
        return size <= edge

    for edge in range(most + 2):
        probe = Mock(side_effect=partial(fits, edge=edge))
        assert largest(probe, most) == min(edge, most)
        assert probe.call_count <= 1 + max(most, 1).bit_length()


def test_the_plan_decides_where_memory_is_known():
    def peak(rows: int) -> int:
        if rows > 40:
            raise UserError("one binding of this device holds less")
        return 1000 + 100 * rows

    bound = (40, "the device", "one binding of this device holds less")
    assert planned_batch(peak, 3050) == planned_batch(peak, 3050, 64) == (20, "memory", None)
    assert planned_batch(peak, 3050, None, search.LIMIT) == (20, search.LIMIT, None)
    assert planned_batch(peak, 3050, 20) == planned_batch(peak, None, 20) == (20, search.MOST, None)
    assert planned_batch(peak, 3050, 8) == (8, search.MOST, None)
    assert planned_batch(peak, 1099) == (0, "memory", None)
    assert planned_batch(peak, None) == planned_batch(peak, None, 10**12) == bound  # only what can be bound


@pytest.mark.parametrize("edge", [1, 2, 3, 63, 64, 65, 504, 10**6])
def test_the_search_has_no_end_but_memory_s(edge: int):
    peak = Mock(side_effect=lambda rows: rows)
    assert planned_batch(peak, edge) == (edge, "memory", None)
    assert max(call.args[0] for call in peak.call_args_list) <= 2 * edge
    assert peak.call_count <= 2 * edge.bit_length() + 1


def test_search_agrees_with_the_plan_and_the_device(device: Device):
    model = chosen_model(None, "mini", 1, device)
    before = device.allocated  # by other tests
    noted: list[dict[str, Any]] = []
    limit = step_of(model, 2).session.memory().peak
    report = find_max_batch(model, Batches(ARGS, limit=limit), hearing(measured=noted.append))
    plain, checkpointing = report["summary"]
    assert (plain["planned"], plain["confirmed"], plain["bounded_by"]) == (2, 2, search.LIMIT)
    assert checkpointing["confirmed"] == checkpointing["planned"] >= 2
    assert plain["why"] is plain["not_run"] is None
    statuses = [(row["batch"], row["status"]) for row in report["rows"] if not row["gradient_checkpointing"]]
    assert statuses == [(1, "OK"), (2, "MAX"), (3, "OOM")]
    assert [row["status"] for row in report["rows"]][-2:] == ["MAX", "OOM"]
    assert [row["batch"] for row in report["best"]["checkpointing"]] == [1, 2]
    for row in report["rows"]:
        if row["status"] == "OOM":
            assert (row["allocated"], row["loss"]) == (None, None)
            continue
        assert row["loss"] > 0
        assert row["allocated"] - before == row["planned"]
    assert noted[0] is report["header"]
    assert noted[0]["schema"] == "wgpu-lora-bench-max-batch/2"


def test_a_device_that_refuses_is_asked_for_less(device: Device, monkeypatch: pytest.MonkeyPatch):
    model = chosen_model(None, "mini", 1, device)
    refused = {"bounded_by": search.REFUSED, "why": "The device could not allocate", "not_run": None}
    for most, batches, summary, rows in (
        (5, {"max_rows": 8}, {"planned": 8, "confirmed": 5, **refused}, "1 OK, 2 OK, 4 OK, 5 MAX, 6 OOM, 8 OOM"),
        (5, {"sizes": (3, 5, 6, 7)}, {}, "3 OK, 5 MAX, 6 OOM"),
        (99, {"max_rows": 20}, {"planned": 20, "confirmed": 20}, "1 OK, 2 OK, 4 OK, 8 OK, 16 OK, 20 OK"),
    ):
        monkeypatch.setattr(search, "measure", measured(most))
        report = find_max_batch(model, Batches(ARGS, **batches))
        assert [f"{row['batch']} {row['status']}" for row in report["rows"]] == rows.split(", ") * 2
        assert all(row.items() >= summary.items() for row in report["summary"])


def test_what_would_take_too_long_is_planned_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: device)
    monkeypatch.setattr(search, "measure", measured(seconds=10.0))
    report = find_max_batch(chosen_model(None, "mini", 1, device), Batches(ARGS, max_rows=80, seconds=250))
    for summary in report["summary"]:
        assert (summary["planned"], summary["confirmed"], summary["bounded_by"]) == (80, 16, search.MOST)
        assert summary["not_run"] == "a step of 32 rows would take about 320 s, and 250 s of the 250 s were left"
    assert main([*COMMAND, "--max-batch", "80", "--time-limit", "250"]) == 0
    message = "80 rows by the plan, with gradient checkpointing, limited by the given maximum; 16 ran"
    assert message in capsys.readouterr().out


def measured(most: int = 10**9, seconds: float = 0.0) -> Any:
    """A stand-in for measuring: the device refuses more rows than `most`, and a row takes so many seconds."""

    def measure(model: Any, batches: Batches, rows: int, checkpointing: bool, seconds_left: float) -> dict[str, Any]:
        if rows > most:
            raise UserError("The device could not allocate.")
        figures = {"step_seconds": rows * seconds, "warmup": 2, "tokens_per_second": 1.0, "planned": 1, "allocated": 1}
        figures["loss"] = 1.0
        return {"kind": "batch", "batch": rows, "gradient_checkpointing": checkpointing, **figures}

    return measure


def test_nothing_is_allocated_for_what_does_not_fit(device: Device):
    before = device.allocated
    model = chosen_model(None, "mini", None, device)
    two = step_of(chosen_model(None, "mini", 2, device), 1).session.memory().peak
    with pytest.raises(UserError, match=r"mini with 3 layers needs .* are available: it fits with --layers 2\."):
        TrainingStep.fitting(model, Batches(ARGS).of(1, False), limit=two)
    with pytest.raises(UserError, match="not even one layer fits"):
        find_max_batch(model, Batches(ARGS, limit=1000))
    assert device.allocated == before


def test_search_as_a_command(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("wgpu_lora.gpu.device.Device", lambda selector: device)
    file = tmp_path / "found.json"
    assert main([*COMMAND, "--max-batch", "1", "--json", str(file)]) == 0
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["header", "batch", "summary", "batch", "summary", "best"]
    assert main([*COMMAND, "--batch-sizes", "99999999999"]) == 0
    out = capsys.readouterr().out
    assert "1 row with gradient checkpointing, limited by the given maximum; a step of them ran" in out
    assert "none fits with gradient checkpointing, limited by the device" in out
    with pytest.raises(UserError, match="--max-batch must be at least 1, not 0"):
        Batches(max_rows=0)
