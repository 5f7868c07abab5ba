"""What protected training costs: rows of raw and protected segments, their files, and the page about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench import MINI_ROW
from support.events import hearing
from support.protect.attesting import quick
from support.training.reports import page_of

from wgpu_lora.bench.training_runs import Work
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models import published_shapes
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.protect.overhead import measure_overhead
from wgpu_lora.protect.overhead_results import (
    ORDERS,
    PUBLISHED,
    Row,
    interpretation,
    make_row,
    overhead_pct,
    read_rows,
    result_file,
    summarize,
)

SIDES = {
    "ElapsedSec": (180.02, 180.05),
    "Steps": (1000, 995),
    "FinalLoss": (0.75, 0.75),
    "AdapterSha256": ("a" * 64, "b" * 64),
    "StepBudget": (1001, 1001),
    "StopReason": ("target seconds", "target seconds"),
    "OutsideSec": (4.0, 4.0),
}
FIGURES = {
    **{"label": "demo 180s", "model": "demo", "gpuModel": "a device", "order": ORDERS[0], "targetSec": 180.0},
    **{f"{side}{name}": values[i] for i, side in enumerate(("raw", "protected")) for name, values in SIDES.items()},
    **{"attestation": "verified", "runtimeState": "zeroized", "initialAdapterSha256": "0" * 64, "protectionSec": 1.0},
}
SIZES = {"max_length": 16, "per_device_train_batch_size": 2, "lora_r": 4, "save_steps": 20}


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(published_shapes._ROWS, "mini", MINI_ROW)


@pytest.fixture(scope="module")
def own_device() -> Device:
    """A device of these tests' own: the cleanup of a protected run overwrites all buffers."""
    return Device()


@pytest.mark.parametrize("orders", [ORDERS[1:], pytest.param(ORDERS * 2, marks=pytest.mark.rare)])
def test_rows_are_clean(own_device: Device, tmp_path: Path, orders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    if len(orders) == 1:
        quick(monkeypatch)
    file = tmp_path / "overhead.json"
    noted: list[Any] = []
    work, repeat = Work(None, "mini", 1, SIZES), len(orders) // 2 or 1
    report = measure_overhead(work, 1.0, orders[:2], repeat, file, hearing(measured=noted.append), own_device)
    assert [record["kind"] for record in noted] == ["header", *["row"] * len(orders)]
    assert [row["order"] for row in report["results"]] == list(orders)
    for row in report["results"]:
        assert row["notClean"] == []
        assert (row["attestation"], row["runtimeState"]) == ("verified", "zeroized")
        assert row["label"] == "mini (synthetic weights, 1 layer) 1s"
        assert row["stabilitySettings"]["computeDtype"] == "bf16"
        assert row["stabilitySettings"]["learningRate"] == 5e-5
        assert row["stabilitySettings"]["saveSteps"] == 20
        assert row["trainableAdapterParams"] < row["totalParams"]
        for side in ("raw", "protected"):
            step_seconds = row[f"{side}ElapsedSec"] / row[f"{side}Steps"]
            assert abs(row[f"{side}ElapsedSec"] - 1.0) < 3 * step_seconds + 0.05  # a busy machine's steps are uneven
            assert row[f"{side}StopReason"] == "target seconds"
            assert row[f"{side}AdapterSha256"] != row["initialAdapterSha256"]
    assert len(read_rows(file)) == len(orders)
    text = file.read_text()
    assert "/tmp" not in text  # no paths
    assert "AGE-SECRET-KEY" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "--target-seconds is 0: give more than 0"),
        ({"seconds": float("nan")}, "--target-seconds is nan"),
        ({"repeat": 0}, "--repeat must be at least 1, not 0"),
        ({"orders": ("zork",)}, "--order must be one of raw-first, protected-first, not 'zork'"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], message: str):
    with naming(COMMAND_LINE), pytest.raises(UserError, match=message):
        measure_overhead(Work(None, "mini", 1, SIZES), **changes)


def test_the_flag_is_the_command(capsys: pytest.CaptureFixture[str]):
    for words in (["bench", "--protected"], ["bench", "protected"]):
        assert main([*words, "--order", "zork", "--shape", "mini"]) == 2
        assert "--order must be one of raw-first, protected-first" in capsys.readouterr().err
    assert main(["bench", "--protected", "--json", "/nowhere/x.json", "--target-seconds", "1"]) == 2
    assert "The directory /nowhere of --json does not exist" in capsys.readouterr().err


def row(overhead: float = 0.5, **changes: Any) -> Row:
    steps = {
        "rawSteps": 100_000,
        "protectedSteps": round(100_000 * (1 - overhead / 100)),
        "protectedElapsedSec": 180.02,
    }
    return make_row({**FIGURES, **steps, **changes})


def test_published_figures_give_the_published_overheads() -> None:
    rows = read_rows(PUBLISHED)
    assert [result["overheadPct"] for result in rows] == [0.86, -0.45, 0.81, 0.59, 1.11, 0.26, 0.77]
    checked = [result for result in rows if "rawSteps" in result]
    assert [round(overhead_pct(result), 2) for result in checked] == [result["overheadPct"] for result in checked]
    assert len(checked) == 3
    with pytest.raises(UserError, match=r"A segment had 0 steps, .* longer --target-seconds"):
        make_row({**FIGURES, "protectedSteps": 0})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attestation": "not verified"}, "the attestation is not verified"),
        ({"runtimeState": "not zeroized"}, "the state of the protected run is not zeroized"),
        ({"rawFinalLoss": None}, "the final loss of the raw segment is not finite"),
        ({"protectedFinalLoss": float("nan")}, "the final loss of the protected segment is not finite"),
        ({"rawAdapterSha256": "0" * 64}, "the adapter of the raw segment is the initial one"),
        ({"protectedAdapterSha256": "a" * 64}, "both adapters are the same after different numbers of steps"),
        ({"protectedStopReason": "non-finite"}, "the protected segment ended before its target (non-finite)"),
        ({"protectedAdapterSha256": "a" * 64, "protectedSteps": 1000}, None),  # the same steps give the same bits
        ({}, None),
    ],
)
def test_when_a_row_is_clean(changes: dict[str, Any], reason: str | None) -> None:
    result = make_row({**FIGURES, **changes})
    assert result["notClean"] == ([reason] if reason else [])
    assert result["cleanModelArtifact"] is not reason


def test_the_summary_has_both_orders_and_the_noise() -> None:
    rows = [row(0.4), row(0.6), row(-0.2, order=ORDERS[1]), row(0.0, order=ORDERS[1])]
    summary = summarize(rows)
    assert summary["byOrder"][ORDERS[1]]["median"] == pytest.approx(-0.1)
    assert (summary["negative"], summary["clean"], summary["withinLimit"]) == (1, 4, True)
    text = " ".join(interpretation(rows))
    assert "median +0.20%, from -0.20% to +0.60% (medians by order: raw-first +0.50%; protected-first -0.10%)" in text
    assert "1 row below zero: that is noise, since protection does not make training faster." in text
    assert "differ by up to 0.20 points; the median overhead is no more than that." in text
    text = " ".join(interpretation([row(3.0, attestation="refused")]))
    assert "above the limit of 1%" in text
    assert "the spread of repeats is unknown. Only one order was run" in text
    assert "demo 180s, raw-first: not clean, because the attestation is refused." in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "zork/1"}, "has the schema 'zork/1', expected 'wgpu-lora-overhead/1'"),
        ({"results": []}, "is damaged"),
        ({"results": [1]}, "is damaged"),
        ({"results": [row() | {"overheadPct": 0.1}]}, "is 0.1, but its figures give 0.50"),
        ({"results": [row() | {"rawSteps": 0}]}, "a segment has no step or no time"),
        ({"results": [row() | {"overheadPct": None}]}, "is damaged"),
        ({"results": [row() | {"targetSec": None}]}, "is damaged"),
        ({"results": [row() | {"protectionSec": "abc"}]}, "is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result_file([row()], "a test", {}) | change))
    with pytest.raises(UserError, match=message):
        read_rows(path)


def test_a_page_shows_measured_rows_beside_the_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, two = tmp_path / "one.json", tmp_path / "two.json"
    first.write_text(json.dumps(result_file([row(0.5), row(-0.2, order=ORDERS[1])], "a test", {})))
    two.write_text(json.dumps(result_file([row(0.9, label="0.5B <180s>")], "a test", {})))
    assert main(["report", str(first), str(two), "--output", str(tmp_path / "page")]) == 0
    assert "overhead  demo 180s: Overhead over 2 rows: median +0.15%" in capsys.readouterr().out
    page = page_of(tmp_path / "page")
    assert page.fetched == []
    for text in ("+0.50%", "-0.20%", "+0.90%", "0.5B <180s>", "1 row below zero: that is noise", "+0.86%", "7B H100"):
        assert text in " ".join(page.text), text
    assert main(["report", str(first), str(tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "is no result file of 'bench --protected': give such files alone" in capsys.readouterr().err
