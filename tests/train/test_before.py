"""Runs of earlier versions resume, to the same numbers. Kernels have changed since, and round differently."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, ROOT

from wgpu_lora.cli import main
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices, choice_key

RUNS = FIXTURES / "runs"  # of version 0.1.0 before records had a schema, on lavapipe with subgroups of 8
BUILD = Program.build
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "members"), [("single", ["."]), ("tuned", ["."]), ("pipeline/second", ["../first", "."])]
)
def test_a_checkpoint_of_the_version_before_resumes(
    name: str, members: list[str], tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shutil.copytree(RUNS, tmp_path / "runs")
    directory, same_device = tmp_path / "runs" / name, is_theirs(device)
    built: list[tuple[Program, Choices]] = []

    def build(program: Program, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        BUILD(program, arena, choices)
        built.append((program, choices))

    monkeypatch.setattr(Program, "build", build)
    assert main(["finetune", "--output", str(directory), "--resume"]) == 0
    for member in members:
        place = (directory / member).resolve()
        ours, expected = place / WEIGHTS, RUNS / "expected" / place.name / WEIGHTS
        for key, value in load_file(expected).items():
            np.testing.assert_allclose(load_file(ours)[key], value, rtol=0, atol=1e-5)
    if same_device and name == "tuned":
        check_chosen(device, built)


def is_theirs(device: Device) -> bool:
    return device.info.name.startswith("llvmpipe") and device.capabilities.subgroup_size == 8


def check_chosen(device: Device, built: list[tuple[Program, Choices]]) -> None:
    """Tuned calls that there still are use the tilings of their checkpoint, which are not always the default."""
    steps = [(step, choices) for program, choices in built for step in program.dispatches if step.kernel.tuning]
    known = [(step, choices[key]) for step, choices in steps if (key := of(step)) in choices]
    assert known
    assert all(step.tiling == tiling for step, tiling in known)
    assert any(step.tiling != step.kernel.tilings(device.capabilities, step.constants)[0] for step, _ in known)


def of(step: Dispatch) -> str:
    return choice_key(step.kernel, step.present, step.constants)
