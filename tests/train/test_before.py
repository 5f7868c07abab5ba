"""Runs that earlier versions left behind go on, to the same bytes where the device is the one they began on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, ROOT

from wgpu_lora.cli import main
from wgpu_lora.gpu.device import Device

RUNS = FIXTURES / "runs"  # of version 0.1.0 before records had a schema, on lavapipe with subgroups of 8
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "members"), [("single", ["."]), ("tuned", ["."]), ("pipeline/second", ["../first", "."])]
)
def test_a_checkpoint_of_the_version_before_resumes(
    name: str, members: list[str], tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shutil.copytree(RUNS, tmp_path / "runs")
    directory = tmp_path / "runs" / name
    assert main(["finetune", "--output", str(directory), "--resume"]) == 0
    for member in members:
        place = (directory / member).resolve()
        ours, expected = place / WEIGHTS, RUNS / "expected" / place.name / WEIGHTS
        if device.info.name.startswith("llvmpipe") and device.subgroup_size == 8:
            assert ours.read_bytes() == expected.read_bytes()
        for key, value in load_file(expected).items():
            np.testing.assert_allclose(load_file(ours)[key], value, rtol=0, atol=1e-5)
