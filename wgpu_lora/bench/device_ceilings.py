"""Measures the ceilings of a device: arithmetic in registers, streaming, decoding NF4, and dispatching a kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from wgpu_lora.bench.timing import run_seconds
from wgpu_lora.events import WrongKernel
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError, WrongResults
from wgpu_lora.gpu.kernel import U32, In, Kernel, Out, kernel, linear_grid
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.timer import Timer, clock_of
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.weights.nf4.nf4_reference import NF4_CODE

CHAINS = ((10, 32), (12, 16), (12, 32), (12, 64), (13, 64))  # (count, unrolling) of FMA chains; the fastest counts
COPY_BYTES = 256 << 20  # of each buffer, or a binding's limit: more than any cache
RUNS = 5
DISPATCHES = 1024
NUMPY_SHARE = 0.9  # least FMA ceiling relative to NumPy's matmul on the same cores
PAUSES = (0, 1, 2, 4, 8)  # seconds before each attempt to reach it


@kernel("fma_chains.wgsl.j2", grid=lambda c: linear_grid(c.size), lib=("linear",))
def fma_chains(x: In, y: Out, *, size: U32, iterations: U32, chains: U32 = 12, unroll: U32 = 4) -> Any:
    """y = the sum of chains c_j = c_j c_(j+1) + x / 4, begun at x j / chains; the last one's neighbour is the first."""
    value = x[:, None] * np.arange(chains) / chains
    for _ in range(iterations):
        value = value * np.roll(value, -1, axis=1) + 0.25 * x[:, None]
    return value.sum(axis=1)


def _words(capabilities: Capabilities, c: Any) -> list[Tiling]:
    narrow = [Tiling(cols=vectors) for vectors in (4, 1)]
    return [replace(tiling, wide=True) for tiling in narrow] + narrow if capabilities.int64 else narrow


@kernel(
    "stream_copy.wgsl.j2",
    grid=lambda c: linear_grid(c.size, c.tile.lanes * c.tile.cols * (8 if c.tile.wide else 4)),
    lib=("linear",),
    variants=_words,
)
def stream_copy(x: In, y: Out, *, size: U32) -> Any:
    """y = x; the size is a multiple of 8."""
    return x.copy()


def _one_subgroup(capabilities: Capabilities, c: Any) -> list[Tiling]:
    size = capabilities.subgroup_size
    return [Tiling("broadcast", size), Tiling()] if size >= 8 else [Tiling()]


@kernel("decode_fma.wgsl.j2", grid=lambda c: linear_grid(c.size, c.tile.lanes), lib=("nf4",), variants=_one_subgroup)
def decode_fma(x: In, y: Out, *, size: U32, iterations: U32, chains: U32 = 4) -> Any:
    """y[i] = x[i] sum of NF4[each nibble of w_c + t d] over words c < chains and steps t = 1 .. iterations.

    w_c = i 0x9e3779b9 + c 0x85ebca6b, d = 0x7f4a7c15, all modulo 2^32.
    """
    word = np.arange(size)[:, None] * 0x9E3779B9 + np.arange(chains) * 0x85EBCA6B
    total = np.zeros(size)
    for step in range(1, iterations + 1):
        now = (word + step * 0x7F4A7C15) & 0xFFFFFFFF
        total += sum(NF4_CODE.astype(np.float64)[(now >> 4 * n) & 15].sum(axis=1) for n in range(8))
    return x * total


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a device, each the fastest of a few variants, measured once per process.

    fma_gflops, decode_fma_gflops: 10^9 operations per second of independent FMA chains, and of decoding NF4 codes with
        one multiply-add each (two operations per code).
    bandwidth_gbs: 10^9 bytes per second of a copy, read and written bytes both counted.
    dispatch_seconds: time of a trivial kernel in a program of many, including recording.
    numpy_gflops: NumPy's f32 matmul on the same cores, for a device that runs on the CPU; else None.
    clock: of the first three (see Timer).
    """

    fma_gflops: float
    bandwidth_gbs: float
    decode_fma_gflops: float
    dispatch_seconds: float
    numpy_gflops: float | None
    clock: str


@cache
def measure_ceilings(device: Device) -> Ceilings:
    """The device's ceilings; the first call takes seconds."""
    fma, numpy = fma_and_numpy_gflops(device) if device.info.kind == "software" else (fma_gflops(device), None)
    return Ceilings(
        fma, bandwidth_gbs(device), decode_fma_gflops(device), dispatch_seconds(device), numpy, clock_of(device)
    )


def fma_and_numpy_gflops(device: Device) -> tuple[float, float]:
    """GFLOP/s of FMA chains and of NumPy's matmul on the same cores, which other processes may be using.

    Both are measured again, after a pause, while the chains fall short of NumPy. The chains' best counts, and NumPy's
    rate in the attempt that was best for the chains.
    """
    attempts: list[tuple[float, float]] = []
    for pause in PAUSES:
        time.sleep(pause)
        attempts.append((fma_gflops(device), numpy_gflops()))
        if attempts[-1][0] >= NUMPY_SHARE * attempts[-1][1]:
            break
    return max(fma for fma, _ in attempts), max(attempts, key=lambda pair: pair[0] / pair[1])[1]


def fma_gflops(device: Device, size: int | None = None, iterations: int = 4096) -> float:
    """The highest GFLOP/s of FMA chains, over a few counts and unrollings: the ceiling of f32 kernels."""
    x = np.full(size or invocations(device), 0.5, np.float32)
    return max(
        2 * iterations * chains * _rate(device, fma_chains, x, iterations=iterations, chains=chains, unroll=unroll)
        for chains, unroll in CHAINS
    )


def bandwidth_gbs(device: Device, nbytes: int | None = None) -> float:
    """The highest GB/s of a copy of `nbytes`, or of as much as a binding holds."""
    x = np.ones(min(nbytes or COPY_BYTES, device.max_binding) // 32 * 8, np.float32)
    return 8 * _rate(device, stream_copy, x)


def decode_fma_gflops(device: Device, size: int | None = None, iterations: int = 512) -> float:
    """The highest GFLOP/s of decoding NF4 with multiply-adds, over a few numbers of words at a time."""
    x = np.ones(size or invocations(device), np.float32)
    return max(
        2 * 8 * chains * iterations * _rate(device, decode_fma, x, iterations=iterations, chains=chains)
        for chains in (1, 2, 4)
    )


def dispatch_seconds(device: Device, count: int = DISPATCHES) -> float:
    """The time of a dispatch of a trivial kernel among `count`, in seconds, by the host's clock."""
    single = SingleKernel(device, fill, {"y": np.zeros(64, np.float32)}, {"size": 64}, repeat=count)
    try:
        return single.seconds(RUNS)
    finally:
        single.free()


def numpy_gflops() -> float:
    """The highest GFLOP/s of NumPy's f32 matmul."""
    size = 1024
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    return 2 * size**3 / min(run_seconds(lambda: a @ a) for _ in range(2 * RUNS)) / 1e9


def invocations(device: Device) -> int:
    """Enough to occupy the device: GPUs need many to hide latency, a CPU needs a few per core."""
    return 1 << 14 if device.info.kind == "software" else 1 << 20


def _rate(device: Device, probe: Kernel, x: np.ndarray, **constants: int) -> float:
    """10^9 values per second, in the fastest of a few runs over all tilings of the probe that compile.

    Raises:
        WrongResults: none does.
    """
    constants, seconds, timer = {"size": x.size, **constants}, list[float](), Timer(device)
    info = device.info
    try:
        with claim(device, 2 * x.nbytes + (1 << 16), "measuring the device's ceilings"):
            for tiling in probe.tilings(device.capabilities, constants):
                try:
                    single = SingleKernel(device, probe, {"x": x, "y": 0 * x}, constants, tiling)
                except ShaderError as error:
                    failed = WrongKernel(info.name, info.driver, probe.name, tiling.to_json(), None, 0.0, error.reason)
                    continue
                seconds += [timer.run(single.program) for _ in range(2 + RUNS)]
                single.free()
    finally:
        timer.free()
    if not seconds:
        raise WrongResults(failed)
    return x.size / min(seconds) / 1e9
