"""Figures of docs/performance.md, in one run: matmuls against the device's own ceiling, and a step's host share.

python scripts/measure.py [--device INDEX|NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.bench.ceiling import fma_gflops
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.single import SingleKernel
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt, nf4_matmul, nf4_matmul_backward
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import prepare_job, with_demo_data

TOKENS, WIDTH = 512, 1024


def numpy_gflops(size: int = 1024) -> float:
    a = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        _ = a @ a
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(times) / 1e9


def matmul_gflops(device: Device, kernel: Kernel, tiles: dict[str, int] | None = None) -> float:
    rng = np.random.default_rng(0)
    m, n, k = TOKENS, WIDTH, WIDTH
    arrays = {"a": rng.standard_normal((m, k), np.float32), "y": np.zeros((m, n), np.float32)}
    if "codes" in kernel.bindings:
        arrays |= {
            "codes": rng.integers(0, 2**32, (WIDTH // 8, WIDTH), np.uint32),
            "scales": rng.random(WIDTH * WIDTH // 64, np.float32),
        }
    else:
        arrays["b"] = rng.standard_normal((n, k), np.float32)
    single = SingleKernel(device, kernel, arrays, {"m": m, "n": n, "k": k}, tiles, repeat=4)
    seconds = single.seconds(5)
    single.free()
    return 2 * m * n * k / seconds / 1e9


def step_shares(device: str | None) -> dict[str, float]:
    """Median seconds of a demo training step, and of what the host does in it while nothing waits for the device."""
    args = with_demo_data(TrainingArguments(output="/nonexistent", device=device, per_device_train_batch_size=1))
    job = prepare_job(args)
    session, run = job.session, job.run
    session.allocate()
    run.place_initial(session)
    run.state.total_steps = 100
    whole, host = [], []
    steps = run.stream.steps()
    waited = _count_waiting(session.device)
    for count in range(6):
        step = next(steps)
        batch = step.micro_batches[0]
        begin, waited[0] = time.perf_counter(), 0.0
        segments = run.stream.segments(step, batch, 1e-3)
        inputs, program = session.step_for(sum(len(s.input_ids) for s in segments))
        inputs.upload(session.device, segments)
        program.run()
        session.device.wait()
        elapsed = time.perf_counter() - begin
        if count > 1:
            whole.append(elapsed)
            host.append(elapsed - waited[0])
    tokens = inputs.tokens
    return {
        "step_seconds": statistics.median(whole),
        "host_share": statistics.median(h / w for h, w in zip(host, whole, strict=True)),
        "tokens": tokens,
        "tokens_per_second": tokens / statistics.median(whole),
    }


def _count_waiting(device: Device) -> list[float]:
    """From now on, the seconds spent waiting for the device, in a list of one."""
    waited, wait = [0.0], device.wait

    def counted() -> None:
        begin = time.perf_counter()
        wait()
        waited[0] += time.perf_counter() - begin

    device.wait = counted  # type: ignore[method-assign]
    return waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = Device(options.device)
    result: dict[str, Any] = {}

    def record(name: str, value: Any) -> None:
        result[name] = value
        print(f"{name:40} {value:.4g}" if isinstance(value, float) else f"{name:40} {value}", flush=True)

    record("device", device.info.name)
    record("driver", device.info.driver)
    record("subgroup_size", device.subgroup_size)
    record("numpy_gflops", numpy_gflops())
    record("fma_ceiling_gflops", fma_gflops(device))
    for kernel in (nf4_matmul, nf4_matmul_backward, matmul_nt, matmul_nn):
        for tiles in kernel.tilings(device.traits, {"m": TOKENS, "n": WIDTH, "k": WIDTH}):
            notes = " wide" * tiles["wide"] + " no subgroups" * (not tiles["sg"])
            name = f"{kernel.name} {tiles['rows']}x{tiles['cols']}/{tiles['span']}{notes}"
            record(name, matmul_gflops(device, kernel, dict(tiles)))
    record("fma_ceiling_gflops_after", fma_gflops(device))
    for name, value in step_shares(options.device).items():
        record(name, value)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
