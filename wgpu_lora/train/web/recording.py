"""Recorded programs as data: shaders, buffers, and dispatches that name both by number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wgpu_lora.gpu.backends import WGPU, tint_text
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.gpu.tiling import Capabilities

FILE_BYTES = 64_000_000  # of a file of weights, at most


class Recording:
    """The programs of a page, which share buffers and arenas.

    A buffer is `{"name", "bytes"}`, with `at` if it has content: its offset in the files of weights, put one behind
    another. Arenas come first. A dispatch is a list of integers: shader, grid (x, y, z), and buffer, offset and size in
    bytes of each binding.
    """

    def __init__(self, programs: dict[str, Program]):
        self.programs = programs
        sizes = Arena.sizes_for([program.plan() for program in programs.values()])
        self.buffers: list[dict[str, Any]] = [{"name": f"arena {i}", "bytes": size} for i, size in enumerate(sizes)]
        self.shaders: dict[str, int] = {}
        self.storage_buffers = 0  # of a dispatch, at most
        self.numbers: dict[Storage, int] = {}
        for program in programs.values():
            for _, parts in program.bindings():
                for storage, _, _ in parts:
                    if not storage.temporary:
                        self.number(storage)

    def number(self, storage: Storage) -> int:
        """The buffer of a storage that is not in an arena."""
        if storage not in self.numbers:
            self.numbers[storage] = len(self.buffers)
            self.buffers.append({"name": storage.name, "bytes": max(4, storage.nbytes)})
        return self.numbers[storage]

    def location(self, tensor: Tensor) -> list[int]:
        """Buffer, offset and size in bytes of a tensor."""
        return [self.number(tensor.storage), tensor.byte_offset, tensor.nbytes]

    def replays(self, capabilities: Capabilities) -> dict[str, list[list[int]]]:
        """The dispatches of each program, in the default tilings of a device with these capabilities."""
        result = {}
        for name, program in self.programs.items():
            locations = program.plan().locations
            result[name] = [
                self._dispatch(with_default_tiling(step, capabilities), parts, locations)
                for step, parts in program.bindings()
            ]
        return result

    def limits(self, replays: Iterable[dict[str, list[list[int]]]]) -> dict[str, int]:
        """The limits of WebGPU, by its names, that a device needs for these dispatches."""
        steps = [step for programs in replays for steps in programs.values() for step in steps]
        return {
            "maxStorageBuffersPerShaderStage": self.storage_buffers,
            "maxStorageBufferBindingSize": max(size for step in steps for size in step[6::3]),
            "maxBufferSize": max(buffer["bytes"] for buffer in self.buffers),
        }

    def _dispatch(
        self, step: Dispatch, parts: list[tuple[Storage, int, int]], locations: dict[Storage, tuple[int, int]]
    ) -> list[int]:
        self.storage_buffers = max(self.storage_buffers, len(step.tensors))
        text = tint_text(step.kernel.source(step.present, step.constants, step.tiling))
        result = [self.shaders.setdefault(text, len(self.shaders)), *step.groups]
        for storage, offset, size in parts:
            buffer, first = locations[storage] if storage.temporary else (self.number(storage), 0)
            result += [buffer, first + offset, size]
        return result

    def write_contents(self, device: Device, directory: Path) -> list[dict[str, Any]]:
        """Write what buffers hold, but for zeros, into files of at most FILE_BYTES; returns their names, sizes and
        SHA-256."""
        result: list[dict[str, Any]] = []
        pending, at = bytearray(), 0

        def write(data: bytes | bytearray) -> None:
            name = f"weights-{len(result):03}.bin"
            (directory / name).write_bytes(data)
            result.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})

        for storage, number in sorted(self.numbers.items(), key=lambda item: item[0].group != "base"):
            values = device.read(storage.buffer)
            if values.any():
                self.buffers[number]["at"] = at
                at += values.nbytes
                pending += values.tobytes()
            while len(pending) >= FILE_BYTES:
                write(pending[:FILE_BYTES])
                del pending[:FILE_BYTES]
        if pending:
            write(pending)
        return result


def with_default_tiling(step: Dispatch, capabilities: Capabilities) -> Dispatch:
    """The dispatch as a device with these capabilities runs it by default."""
    return step if step.fixed else step.tiled(step.tilings(capabilities)[0])


def web_capabilities(subgroup_size: int = 0) -> Capabilities:
    """What kernels may use in any browser: WebGPU's default limits, and as many registers as the least of GPUs has.

    subgroup_size: of a device all of whose subgroups have this size; 0 uses none.
    """
    return Capabilities(subgroup_size=subgroup_size, registers=128)


def web_device(selector: str | int | None = None) -> Device:
    """A device whose kernels are those of a browser without subgroups."""
    device = Device(selector, DeviceOptions(subgroups=False, default_limits=True, backend=WGPU))
    device.capabilities = web_capabilities()
    return device
