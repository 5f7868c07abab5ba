"""Raw and protected segments of the same training, measured one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.attesting import quick
from support.bench import MINI_ROW
from support.events import hearing

from wgpu_lora.bench.overhead import ORDERS
from wgpu_lora.bench.overhead_results import read_results
from wgpu_lora.bench.training_runs import Work
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models import published_shapes
from wgpu_lora.names.spelling import COMMAND_LINE, naming
from wgpu_lora.protect.bench import Measuring, bench_protected, runtime_state

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
    measuring = Measuring(Work(None, "mini", 1, SIZES), 1.0, orders[:2], len(orders) // 2 or 1)
    found = bench_protected(measuring, file, hearing(measured=noted.append), own_device)
    assert [record["kind"] for record in noted] == ["header", *["row"] * len(orders)]
    assert [row["order"] for row in found["results"]] == list(orders)
    for row in found["results"]:
        assert row["notClean"] == []
        assert (row["attestation"], row["runtimeState"]) == ("verified", "zeroized")
        assert row["label"] == "mini (synthetic weights, 1 layer) 1s"
        assert row["stabilitySettings"]["computeDtype"] == "bf16"
        assert row["stabilitySettings"]["learningRate"] == 5e-5
        assert row["stabilitySettings"]["saveSteps"] == 20
        assert row["trainableAdapterParams"] < row["totalParams"]
        for side in ("raw", "protected"):
            each = row[f"{side}ElapsedSec"] / row[f"{side}Steps"]
            assert abs(row[f"{side}ElapsedSec"] - 1.0) < 3 * each + 0.05  # a busy machine's steps are uneven
            assert row[f"{side}StopReason"] == "target seconds"
            assert row[f"{side}AdapterSha256"] != row["initialAdapterSha256"]
    assert len(read_results(file).rows) == len(orders)
    text = file.read_text()
    assert "/tmp" not in text  # no paths
    assert "AGE-SECRET-KEY" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_seconds": 0.0}, "--target-seconds is 0: give more than 0"),
        ({"target_seconds": float("nan")}, "--target-seconds is nan"),
        ({"repeat": 0}, "--repeat must be at least 1, not 0"),
        ({"orders": ("zork",)}, "--order must be one of raw-first, protected-first, not 'zork'"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], message: str):
    with naming(COMMAND_LINE), pytest.raises(UserError, match=message):
        Measuring(Work(None, "mini", 1, SIZES), **changes)


def test_a_wipe_that_failed_is_said():
    assert runtime_state({"complete": True, "not_wiped": ["what never can be"]}) == "zeroized"
    failed = {"complete": False, "not_wiped": ["the device: it was lost"]}
    assert runtime_state(failed) == "not zeroized (the device: it was lost)"


def test_the_flag_is_the_command(capsys: pytest.CaptureFixture[str]):
    for words in (["bench", "--protected"], ["bench", "protected"]):
        assert main([*words, "--order", "zork", "--shape", "mini"]) == 2
        assert "--order must be one of raw-first, protected-first" in capsys.readouterr().err
    assert main(["bench", "--protected", "--json", "/nowhere/x.json", "--target-seconds", "1"]) == 2
    assert "The directory /nowhere of --json does not exist" in capsys.readouterr().err
