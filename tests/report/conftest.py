"""Finished runs for the tests of their reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.reports import profile_of
from support.training import model_dir, random_rows

from wgpu_lora.cli import main

STATUS = {"gpu_busy": 97.0, "gpu_power": 203.0, "gpu_power_limit": 355.0, "gpu_temperature": 61.0, "gpu_memory": 3.5}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, the second with held-out data and a profile."""
    root = tmp_path_factory.mktemp("runs")
    rows = str(random_rows(root / "rows.jsonl", 6, 301))
    common = ["--model", str(model_dir("qwen2")), "--data", rows, "--max-length", "16", "--no-packing", "--lora-r", "4"]
    common += ["--max-steps", "3", "--logging-steps", "1"]
    for name, more in (("first", []), ("second", ["--eval-data", rows, "--learning-rate", "1e-3"])):
        assert main(["finetune", *common, "--output", str(root / name), *more]) == 0
    log = root / "second" / "log.jsonl"  # as on a device whose status can be read
    lines = [json.loads(line) | STATUS for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "second" / "profile.json").write_text(json.dumps(profile_of(root / "second")))
    return root
