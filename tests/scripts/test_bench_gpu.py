"""What bench-gpu runs, and what it puts beside the measurements."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench_gpu import parts
from scripts.gpu_compilers.compiled import Compiled
from scripts.gpu_compilers.devices import GPUS
from scripts.gpu_compilers.predictions import figures, kind_of, nearest, to_json
from scripts.gpu_compilers.run import Answers, Row
from wgpu_lora.gpu.tiling import Tiling


def test_correctness_comes_first() -> None:
    whole, quick = list(parts("0", False)), list(parts(None, True))
    jobs = ["kernels", "kernels", "bench", "bench", *["bench-training"] * 3, *["comparison"] * 4]
    assert [part.job for part in whole] == jobs
    assert {part.options["device"] for part in whole} == {"0"}
    assert {part.options.get("shape", "tiny-qwen3") for part in quick} == {"tiny-qwen3"}


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
    predicted = json.loads(json.dumps(to_json(answers)))
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
