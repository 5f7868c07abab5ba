"""Finished runs for the tests of their reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.training.reports import profile_of

STATUS = {"gpu_busy": 97.0, "gpu_power": 203.0, "gpu_power_limit": 355.0, "gpu_temperature": 61.0, "gpu_memory": 3.5}


@pytest.fixture(scope="session")
def runs(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs: the second has held-out data and a profile, the first neither, and another learning rate."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        shutil.copytree(finished_run / "run", root / name)
        path = root / name / "log.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if name == "first":
            lines = [line for line in lines if line["step"]]
            for line in lines:
                line.pop("eval_loss", None)
        else:  # as on a device whose status can be read
            lines = [line | STATUS for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = json.loads((root / "first" / "run.json").read_text())
    facts["options"] |= {"eval_data": None, "learning_rate": 2e-4}
    facts["state"] |= {name: None for name in facts["state"] if "eval" in name} | {"best_step": 0}
    (root / "first" / "run.json").write_text(json.dumps(facts | {"eval_data": None}))
    (root / "second" / "profile.json").write_text(json.dumps(profile_of(root / "second")))
    return root
