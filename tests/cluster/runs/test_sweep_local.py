"""A sweep on this machine, whole, with a scheduler of Ray Tune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster.hosts import WAIT
from support.sampling import sample

pytest.importorskip("ray.tune")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a user who has nothing yet; whatever Ray has started for it is ended."""
    own = {
        "WGPU_LORA_CLUSTER_DIR": "cluster",
        "WGPU_LORA_CLUSTER_LOCAL_DIR": "local",
        "WGPU_LORA_SHARE_DIR": "share",
        "WGPU_LORA_DATA_DIR": "data",
        "XDG_CACHE_HOME": "cache",
    }
    variables = {**os.environ, **{name: str(tmp_path / path) for name, path in own.items()}}
    variables |= {"WGPU_LORA_NO_RUN_LOG": "1", "WGPU_LORA_NO_TUNE": "1", "WGPU_LORA_NO_CHECK": "1"}
    yield variables
    wgpu_lora(variables, tmp_path, "down", "--local")


def wgpu_lora(environment: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wgpu_lora", "cluster", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT, check=False
    )


SCHEDULERS = {
    "asha": ("--grace-period", "4", "--reduction-factor", "2"),
    "pbt": ("--perturbation-interval", "8"),
}


@pytest.mark.parametrize("scheduler", sample([*SCHEDULERS], 1 / 2))
def test_a_grid_is_trained_and_listed_the_best_first(
    tmp_path: Path, environment: dict[str, str], scheduler: str
) -> None:
    """With ASHA, the poor adapter ends early; with PBT, it goes on from the good one."""
    (tmp_path / "rows").mkdir()
    rows = [json.dumps({"prompt": f"Say {i}.", "completion": f"It is {i * i % 7}."}) for i in range(24)]
    (tmp_path / "rows/train.jsonl").write_text("\n".join(rows))
    (tmp_path / "rows/valid.jsonl").write_text("\n".join(rows[:4]))
    words = ("sweep", "--local", "--data", "rows", "--model", "demo", "--max-length", "64", "--max-steps", "16")
    words += ("--param", "learning_rate=2e-3,1e-6", "--output", "out", "--logging-steps", "1", "--warmup-ratio", "0")
    words += ("--scheduler", scheduler, *SCHEDULERS[scheduler])
    process = wgpu_lora(environment, tmp_path, *words)
    assert process.returncode == 0, process.stdout + process.stderr

    result = json.loads((tmp_path / "out/sweep.json").read_text())
    trials = result["adapters"]
    assert result["over"]
    assert [trial["value"] for trial in trials] == sorted(trial["value"] for trial in trials)
    assert (trials[0]["state"], trials[0]["step"]) == ("finished", 16)
    logs = []
    for trial in trials:  # the ended ones keep their results, too
        directory = Path(trial["output"])
        assert directory.parent == tmp_path / "out"
        assert (directory / "adapter_model.safetensors").exists()
        logs.append([json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()])
        steps = [line["step"] for line in logs[-1] if "loss" in line]
        assert steps == list(range(1, trial["step"] + 1))
    if scheduler == "asha":
        assert [trial["params"] for trial in trials] == [{"learning_rate": 2e-3}, {"learning_rate": 1e-6}]
        assert trials[1]["state"] == "stopped"
        assert 4 <= trials[1]["step"] < 16
    else:
        poor = next(log for trial, log in zip(trials, logs, strict=True) if trial["name"].endswith("1e-06"))
        assert [trial["state"] for trial in trials] == ["finished", "finished"]
        first = next(line for line in poor if line["step"] == 1)
        assert first["learning_rate"] == pytest.approx(2e-3, rel=0.1), "its first steps are now those of the good one"

    again = wgpu_lora(environment, tmp_path, *words)
    assert again.returncode == 2
    assert "already holds a sweep's sweep.json" in again.stderr
