"""The simulated cluster of 1,000 adapters, and the command that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wgpu_lora.cli import main
from wgpu_lora.cluster.placement.simulation.measured import OURS, read_measured
from wgpu_lora.cluster.placement.simulation.run import simulate
from wgpu_lora.cluster.placement.simulation.scenario import Scenario
from wgpu_lora.errors import UserError


@pytest.mark.slow
def test_a_thousand_adapters_take_little_more_than_the_lower_bound():
    outcome = simulate(Scenario(), read_measured([]))
    assert outcome.failures > 20
    assert outcome.bound <= outcome.makespan <= 1.15 * outcome.bound


def test_the_command_prints_the_makespan_and_the_bound(capsys: pytest.CaptureFixture[str]):
    assert main(["cluster", "simulate", "--adapters", "12", "--devices", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ratio"] == pytest.approx(facts["makespan_seconds"] / facts["bound_seconds"])
    assert facts["ratio"] >= 1
    assert main(["cluster", "simulate", "--adapters", "12", "--devices", "4"]) == 0
    assert "before which no placement" in capsys.readouterr().out


def test_speeds_of_other_devices_are_read_from_result_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (kind,) = read_measured([OURS])
    assert kind.speed > 0
    assert kind.slowest <= 1 <= kind.fastest
    header = OURS.read_text().splitlines()[0]
    (tmp_path / "other.jsonl").write_text(header + "\n")
    with pytest.raises(UserError, match="device_speed"):
        read_measured([tmp_path / "other.jsonl"])
    assert main(["cluster", "simulate", "--bench", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
