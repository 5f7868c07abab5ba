"""Timings that vary by more than a contract allows show nothing: they are noisy, and neither hold nor are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.bench import CEILINGS, mini, result
from support.tuning import verdicts

from wgpu_lora.bench.brick_results import SCHEMA, Writer, read_results
from wgpu_lora.bench.brick_run import judge, measured_choices
from wgpu_lora.bench.bricks import WORKLOADS
from wgpu_lora.bench.contract import load_contract
from wgpu_lora.bench.recorded_brick import ProgramWorkload
from wgpu_lora.cli import main
from wgpu_lora.cli.bench.brick_tables import cells, details, noise_text
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tuner import Tuner


def test_timings_that_vary_too_much_do_not_hold(tmp_path: Path) -> None:
    of = {"holds": {"spread": 0.049}, "noisy": {"spread": 0.05}, "broken": {"spread": 0.2, "broken": ["late"]}}
    found = {verdict: result(cv_asked=0.05, **changes) for verdict, changes in of.items()}
    assert {verdict: one.verdict for verdict, one in found.items()} == {verdict: verdict for verdict in of}
    assert [cells(one)[-1] for one in found.values()] == ["passed", "noisy", "failed"]
    file = tmp_path / "a.jsonl"
    writer = Writer(file)
    writer.write({"schema": SCHEMA, "device": {}, "options": {}})
    for one in found.values():
        writer.write(one.record())
    assert [line["verdict"] for line in lines_of(file)] == list(of)
    assert read_results(file)[1] == list(found.values())
    assert noise_text(found["noisy"]) == "5 timings vary by 5.0%, the limit is 5%"
    assert result(spread=0.9).verdict == "holds"  # of a file that says nothing of it


@pytest.mark.parametrize("brick", ["lora_forward", "lora_backward"])
@pytest.mark.parametrize(("share", "verdict"), [(0.1, "holds"), (0.26, "broken"), (-0.52, "noisy")])
def test_a_negative_share_neither_holds_nor_fails(brick: str, share: float, verdict: str) -> None:
    found = result(brick, extra={"added_share": share})
    judge(load_contract(brick), found, {"tokens": 512, "rank": 16, "hidden_size": 512}, "software")
    assert found.verdict == verdict
    if verdict == "noisy":
        assert noise_text(found) == "added_share is negative, which only noise explains: measure again"
        assert "lost in noise" in details(found)
        assert "-52%" not in details(found)


def test_a_comparison_is_of_choices_that_were_all_measured_or_of_defaults(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where time runs out, the sizes that were timed do not count either."""
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path))
    context = mini(device, tune=True)
    (plain,), (compared,) = (list(WORKLOADS[name](context)) for name in ("nf4_matmul", "lora_forward"))
    heavy = {id(step) for program in compared.programs() for step in program.dispatches if step.kernel.tuning}
    timed: list[Any] = []

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        timed.append(call)
        return 1.0 if tiling == call.tiling else 0.1

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    assert heavy
    assert (plain.compares, compared.compares) == (False, True)
    monkeypatch.setattr(Tuner, "_time", lambda self, trials, *_: [self._try_next(trials[0]) for _ in range(2)])
    assert measured_choices(context, compared) == {}
    assert timed
    monkeypatch.undo()
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Tuner, "_seconds", seconds)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    assert measured_choices(context, compared) == {}  # what was skipped stays so
    choices = measured_choices(replace(context, retune=True), compared)
    assert len(choices) > 1
    assert measured_choices(context, compared) == choices


@pytest.mark.parametrize(("seconds", "verdict"), [([1.0], "holds"), ([1.0, 2.0], "noisy")])
def test_noise_alone_is_said_and_changes_no_exit_code(
    device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: list[float],
    verdict: str,
) -> None:
    monkeypatch.setattr("wgpu_lora.bench.brick_run.measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(import_module("wgpu_lora.cli.bench.bricks"), "_context", lambda *a, **k: mini(device))
    times = cycle(seconds)
    monkeypatch.setattr(ProgramWorkload, "run", lambda self: next(times))
    file = tmp_path / "a.jsonl"
    assert main(["bench", "--brick", "rope", "--time-limit", "0.01", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("rope "))
    assert row.split()[-1] == {"holds": "passed", "noisy": "noisy"}[verdict]
    assert (", the limit is 5%" in out) == (verdict == "noisy")
    assert [line["verdict"] for line in lines_of(file)] == [verdict]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]
