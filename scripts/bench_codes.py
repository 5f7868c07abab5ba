"""Products with low-bit codes beside those with NF4, in turns in one process: python -m scripts.bench_codes.

What is printed are medians of ratios to NF4's time, by the wall clock and by processor time, above 1 if faster.
Processor time means something on CPU drivers alone.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.weights.lowbit.lowbit_layout import Scheme, scheme_of
from wgpu_lora.weights.lowbit.lowbit_products import codes_matmul, codes_matmul_backward
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

LEFT_OUT = ("bias", "a_scale", "h", "factor", "ranges")


def product(device: Device, kernel: Kernel, rows: int, size: int, scheme: Scheme | None, a_type: str) -> SingleKernel:
    """The product of `rows` rows with a square matrix, in the default tiling."""
    shape = {"m": rows, "n": size, "k": size, "a_type": a_type}
    shape |= {"bits": scheme.bits, "group": scheme.group} if scheme else {}
    assert kernel.tuning
    constants = {**kernel.defaults, **shape}
    present = tuple(name for name in kernel.bindings if name not in LEFT_OUT)
    arrays = kernel.tuning.inputs(constants, present, np.random.default_rng(0))
    tiling = kernel.tilings(device.capabilities, constants)[0]
    return SingleKernel(device, kernel, arrays, shape, tiling, repeat=8 if rows < 16 else 2)


def main() -> None:
    parser = argparse.ArgumentParser("bench_codes", description=__doc__)
    parser.add_argument("--schemes", default="lut4,lut3,lut2,int8,lut4-row,lut2-row,lut2-g16")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compute-dtype", default="f32", choices=("f32", "bf16"))
    given = parser.parse_args()
    device, names = Device(), ["nf4", *given.schemes.split(",")]
    for form, nf4, codes in (
        ("forward", nf4_matmul, codes_matmul),
        ("input gradient", nf4_matmul_backward, codes_matmul_backward),
    ):
        runs = {}
        for name in names:
            scheme = None if name == "nf4" else scheme_of(name, "")
            kernel = codes if scheme else nf4
            runs[name] = product(device, kernel, given.rows, given.size, scheme, given.compute_dtype)
            runs[name].run()
            device.wait()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for round_ in range(given.rounds):
            for name in names if round_ % 2 else reversed(names):
                before = time.perf_counter(), time.process_time()
                runs[name].run()
                device.wait()
                times[name].append((time.perf_counter() - before[0], time.process_time() - before[1]))
        for name, found in times.items():
            wall, cpu = (median(a[i] / b[i] for a, b in zip(times["nf4"], found, strict=True)) for i in (0, 1))
            print(
                f"{form}, {given.rows} rows, {name}: {wall:.2f} of NF4's speed, {cpu:.2f} by processor time", flush=True
            )
        for run in runs.values():
            run.free()


if __name__ == "__main__":
    main()
