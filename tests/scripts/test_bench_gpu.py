"""What bench-gpu runs, and what it puts beside the measurements."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.broken import Break
from support.events import hearing

from scripts.bench import gpu_report
from scripts.bench.gpu_report import wrong
from scripts.gpu_compilers.compiled_shader import Compiled
from scripts.gpu_compilers.compiler_report import figures, kind_of, nearest, predictions_json
from scripts.gpu_compilers.compiler_run import Answers, Row
from scripts.gpu_compilers.gpus import GPUS
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.verdicts import Verdicts


def test_the_exit_code_says_that_a_kernel_is_wrong() -> None:
    fine = {"exit_code": 1, "results": [{"kind": "tiling", "right": True}, {"kind": "kernel", "right": None}, {}]}
    assert wrong([fine, {"exit_code": 2, "results": []}]) == 0
    assert wrong([fine, {"exit_code": 1, "results": [{"kind": "kernel", "right": False}]}]) == 1


@pytest.mark.parametrize(
    ("vendor", "name", "gpu"),
    [
        (0x1002, "AMD Radeon RX 5700 XT (RADV NAVI10)", "rdna1"),
        (0x1002, "AMD Radeon RX 6800 (RADV NAVI21)", "rdna1"),
        (0x1002, "AMD Radeon RX 7900 XTX", "rdna3"),
        (0x1002, "AMD Radeon RX 9070 XT", "rdna4"),
        (0x1002, "AMD Radeon Graphics", "rdna3"),
        (0x10DE, "NVIDIA GeForce RTX 4090", "ada"),
        (0x106B, "Apple M2 Pro", "m1"),
        (0x10005, "llvmpipe (LLVM 15.0.6, 256 bits)", None),
    ],
)
def test_the_nearest_gpu(vendor: int, name: str, gpu: str | None) -> None:
    assert kind_of(vendor, name) == gpu


def test_predictions_are_found_by_pipeline() -> None:
    def call(tiling: Tiling, default: bool) -> dict[str, Any]:
        made = {"kernel": "matmul_nt", "constants": {"b_type": "f32"}, "bindings": ["a", "b", "y"]}
        return {**made, "tiling": tiling.to_json(), "default": default}

    used, other = call(Tiling("broadcast", 32, 16, 4, 4), True), call(Tiling(), False)
    answers = [Answers(GPUS["rdna3"], size, "RX 7900 XTX", "RADV") for size in (64, 32)]
    answers[1].rows = [Row(used, Compiled(120, 0, 0, 0, 12, 900, None)), Row(other, None)]
    predicted = json.loads(json.dumps(predictions_json(answers)))
    info = SimpleNamespace(vendor_id=0x1002, name="AMD Radeon RX 7600")
    device: Any = SimpleNamespace(info=info, capabilities=SimpleNamespace(subgroup_size=32))
    found = nearest(device, predicted)
    assert found is not None
    assert (found["gpu"], found["subgroup_size"]) == ("rdna3", 32)
    assert figures(found, [used, other]) == [
        {"registers": 120, "spilled": 0, "occupancy": 12, "instructions": 900},
        None,
    ]
    assert figures(None, [used]) == [None]


@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
@pytest.mark.parametrize(("kernel", "compiles"), [("attention_forward", True), ("rmsnorm_forward", False)])
def test_a_kernel_that_is_wrong_loses_no_other_measurement(
    device: Device, broken: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, compiles: bool
) -> None:
    broken(kernel, compiles=compiles)
    monkeypatch.setattr(device, "verdicts", Verdicts(device, tmp_path))
    monkeypatch.setattr(gpu_report, "Device", lambda _: device)
    monkeypatch.setattr(gpu_report, "Tuner", partial(Tuner, seconds=0.0, directory=tmp_path))
    records: list[dict[str, Any]] = []
    job = {"shape": "tiny-qwen3", "tokens": 16, "rounds": 1, "candidates": False}
    ended = gpu_report.kernels(hearing(measured=records.append), where="the job", **job)  # type: ignore[arg-type]
    assert (ended.code, set(ended.result["wrong"])) == (1, {kernel})
    assert kernel in ended.said
    kinds = {record["kind"] for record in records}
    assert "tiling" in kinds
    if compiles:  # a step can be taken
        assert {"kernel", "time", "tuning"} <= kinds
        right = {record["kernel"] for record in records if record["kind"] == "kernel" and record["right"]}
        assert {"rmsnorm_forward", "nf4_matmul"} <= right
    else:
        assert [record["reason"] for record in records if record["kind"] == "kernel"] == ["register allocation failed"]
