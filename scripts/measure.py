"""Matrix products at 512 x 1024 x 1024 in every tiling, against the device's own ceilings of the same run.

python scripts/measure.py [--device INDEX|NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.bench.ceiling import measure_ceilings
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.single import SingleKernel
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt
from wgpu_lora.weights.nf4 import nf4_matmul, nf4_matmul_backward

SHAPE = {"m": 512, "n": 1024, "k": 1024}
A_TYPES = {"nf4_matmul": ("f32", "bf16", "f16"), "nf4_matmul_backward": ("f32", "bf16", "f16")}


def gflops(device: Device, kernel: Kernel, tiling: Tiling, a_type: str) -> float:
    """Of one product, by the median of five."""
    assert kernel.tuning is not None
    constants = {**kernel.defaults, **SHAPE, "a_type": a_type}
    present = tuple(name for name in kernel.bindings if name not in kernel.optional)
    arrays = kernel.tuning.inputs(constants, present, np.random.default_rng(0))
    single = SingleKernel(device, kernel, arrays, constants, tiling, repeat=4)
    seconds = single.seconds(5)
    single.free()
    return 2 * kernel.tuning.work(constants) / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = Device(options.device)
    result: dict[str, Any] = {}

    def record(name: str, value: Any) -> None:
        result[name] = value
        print(f"{name:50} {value:.4g}" if isinstance(value, float) else f"{name:50} {value}", flush=True)

    record("device", device.info.name)
    record("driver", device.info.driver)
    record("subgroup_size", device.capabilities.subgroup_size)
    for name, value in vars(measure_ceilings(device)).items():
        record(name, value)
    for kernel in (nf4_matmul, nf4_matmul_backward, matmul_nt, matmul_nn):
        for a_type in A_TYPES.get(kernel.name, ("f32",)):
            for tiling in kernel.tilings(device.capabilities, SHAPE):
                notes = " wide" * tiling.wide + f" {tiling.family}" * (tiling.family != "broadcast")
                name = f"{kernel.name} {a_type} {tiling.rows}x{tiling.cols}{notes}"
                record(name, gflops(device, kernel, tiling, a_type))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
