"""Kernels in AMD's real compiler (`make test-gpu-compilers`): too many registers fail the check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.gpu_compilers.__main__ import main
from wgpu_lora.gpu.tiling import Tiling

SMALL = [
    "--gpu",
    "rdna3",
    "--subgroup-size",
    "32",
    "--shape",
    "qwen2.5-0.5b",
    "--kernel",
    "matmul_nt",
    "--default-only",
]


def test_a_tiling_that_needs_too_many_registers_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hungry, report = Tiling("broadcast", 32, rows=32, cols=8, span=4), tmp_path / "found.json"
    run = [*SMALL, "--check", "--json", str(report), "--raw", str(tmp_path / "raw")]
    assert main(run) == 0
    assert main([*run, "--tiling", json.dumps(hungry.to_json())]) == 1
    assert "broadcast 32x8" in capsys.readouterr().err
    content = json.loads(report.read_text())
    assert content["schema"] == "wgpu-lora-gpu-compilers/2"
    (device,) = content["devices"]
    rows = {tuple(sorted(row["tiling"].items())): row for row in device["kernels"]}
    assert rows[tuple(sorted(hungry.to_json().items()))]["spilled"] > 0
    assert any(row["default"] and row["registers"] > 32 and row["loop"]["multiply_adds"] for row in device["kernels"])
    assert any(row["bound"]["port"] == "VALU" and 0.3 < row["bound"]["share"] < 1 for row in device["kernels"])
    assert len(list((tmp_path / "raw").iterdir())) >= len(device["kernels"])


def test_matrix_units_are_compiled_through_dawn(tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    of = ["--gpu", "rdna3", "--subgroup-size", "32", "--shape", "qwen2.5-0.5b", "--kernel", "nf4_matmul"]
    assert main([*of, "--backend", "dawn", "--compute-dtype", "f16", "--default-only", "--json", str(report)]) == 0
    (device,) = json.loads(report.read_text())["devices"]
    rows = [row for row in device["kernels"] if row["tiling"]["family"] == "matrix"]
    assert rows
    assert all(row["loop"]["counts"]["matrix"] and 0.5 < row["bound"]["share"] < 1 for row in rows)
