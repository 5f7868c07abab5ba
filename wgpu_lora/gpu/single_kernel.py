"""Runs a single kernel on arrays of the host, for tests and measurements."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling import Tiling

LONG = 2.0  # seconds after which no further run is timed
DTYPE = {"float32": "f32", "uint32": "u32", "int32": "i32", "uint16": "bf16", "float16": "f16", "uint8": "u8"}


class SingleKernel:
    """A program of one dispatch, repeated `repeat` times, on arrays that are uploaded to the device."""

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        arrays: dict[str, np.ndarray],
        constants: dict[str, Any],
        tiling: Tiling | None = None,
        repeat: int = 1,
    ):
        self.device = device
        self.kernel = kernel
        self.arrays = arrays
        self.tensors: dict[str, Tensor] = {
            name: persistent(array.shape, DTYPE[array.dtype.name], "workspace", name) for name, array in arrays.items()
        }
        self.program = Program(device, kernel.name)
        for _ in range(repeat):
            self.program.dispatch(
                kernel, *(self.tensors.get(name) for name in kernel.bindings), tiling=tiling, **constants
            )
        allocate(device, self.program.persistent_storages())
        try:
            self.program.build(Arena(device))
        except BaseException:
            self.free()
            raise
        self.upload()

    def upload(self) -> None:
        for name, array in self.arrays.items():
            self.device.write(self.tensors[name].storage.buffer, array)

    def run(self) -> None:
        self.program.run()

    def outputs(self) -> list[np.ndarray]:
        return [self.read(name) for name in self.kernel.outputs]

    def read(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        data = self.device.read(self.tensors[name].storage.buffer, array.nbytes)
        return data.view(array.dtype).reshape(array.shape)

    def seconds(self, runs: int = 5) -> float:
        """Median time of one dispatch in seconds, by the host's clock, after two warm-up runs; of slow dispatches, the
        last of as many runs as LONG allows."""
        times: list[float] = []
        while len(times) < runs + 2 and sum(times) < LONG:
            begin = time.perf_counter()
            self.program.run()
            self.device.wait()
            times.append(time.perf_counter() - begin)
        return float(np.median(times[2:] or times[-1:])) / len(self.program.dispatches)

    def free(self) -> None:
        for storage in self.program.persistent_storages():
            self.device.free(storage.buffer)
