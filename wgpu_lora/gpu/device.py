"""An opened device: its capabilities, its buffers (every byte is counted) and its compute pipelines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from wgpu_lora.errors import DeviceWarning, UserError
from wgpu_lora.gpu.backends import AUTO, ENVIRONMENT, SUBGROUP, WGPU, Backend, MatrixConfiguration, backend
from wgpu_lora.gpu.device_errors import OutOfDeviceMemory, ShaderError, raise_device_lost
from wgpu_lora.gpu.device_list import MAPPABLE, DeviceInfo, choose, choose_backend
from wgpu_lora.gpu.tiling import Capabilities
from wgpu_lora.names.spelling import flag
from wgpu_lora.processes.signals import check_stop, end_signal_delayed

WRITE_CHUNK = 16 << 20  # bytes; drivers stage a queued write, so one large write would double a tensor's memory
INTEL = 0x8086
THREAD_LIMITS = "max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x"
WEBGPU_LIMITS = {
    "max-buffer-size": 256 << 20,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-compute-workgroup-storage-size": 16384,
    **dict.fromkeys(THREAD_LIMITS, 256),
}

PROBE = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(WG)
fn main(@builtin(subgroup_size) size: u32, @builtin(subgroup_invocation_id) lane: u32,
        @builtin(local_invocation_index) local: u32) {
    if (local == 0u) { out[0] = size; }
    out[1u + local] = lane;
}
"""

MATRIX_PROBE = """
const WORDS = (M + N) * K / 4u; // of four f16
@group(0) @binding(0) var<storage, read> halves: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
var<workgroup> tile: array<vec2<u32>, WORDS>;
var<workgroup> sums: array<Sum, M * N>;

@compute @workgroup_size(4u * LANES) @subgroup_size(LANES)
fn main(@builtin(local_invocation_index) local: u32) {
    for (var i = local; i < WORDS; i += 4u * LANES) { tile[i] = halves[i]; }
    workgroupBarrier();
    let left = subgroupMatrixLoad<subgroup_matrix_left<f16, K, M>, row_major>(&tile, 0u, K / 4u);
    let right = subgroupMatrixLoad<subgroup_matrix_right<f16, N, K>, col_major>(&tile, M * K / 4u, K / 4u);
    var sum = subgroup_matrix_result<Sum, N, M>();
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    if (local / LANES == 1u) { subgroupMatrixStore<row_major>(&sums, 0u, sum, N); }
    workgroupBarrier();
    for (var i = local; i < M * N; i += 4u * LANES) { y[i] = f32(sums[i]); }
}
"""


@dataclass(frozen=True)
class DeviceOptions:
    """Features and limits to request from a device. Tests disable features through environment variables.

    subgroup_size: instead of the measured one, for a device that compiles but runs nothing (`make gpu-compilers`).
    backend: the WebGPU implementation, one of `backends.BACKENDS`.
    """

    subgroups: bool = True
    default_limits: bool = False
    checked: bool = False
    subgroup_size: int | None = None
    backend: str | None = None

    @classmethod
    def from_environment(cls) -> DeviceOptions:
        def on(name: str) -> bool:
            return os.environ.get(name, "") not in ("", "0")

        return cls(
            subgroups=not on("WGPU_LORA_NO_SUBGROUPS"),
            default_limits=on("WGPU_LORA_DEFAULT_LIMITS"),
            checked=on("WGPU_LORA_CHECKED"),
            backend=os.environ.get(ENVIRONMENT),
        )


class Device:
    """A wgpu device and its memory accounting.

    Args:
        selector: see `devices.choose`.
        options: by default, those in the environment.

    Attributes:
        webgpu: the WebGPU implementation.
        info: name, driver, features and limits.
        capabilities: what kernels may use; the subgroup size is measured.
        max_binding, max_buffer: bytes.
        allocated, peak_allocated: bytes of all live buffers in the device's memory, now and at most.
        queued_seconds: of work that was submitted since the last wait, as it was timed before.
        host_allocated: bytes of all live buffers in the host's memory.
        live: all buffers that have not been freed, in either memory.
        before_free: called with each buffer before it is destroyed (see `gpu.buffer_wipe`).

    Raises:
        UserError: no device matches the selector.
    """

    def __init__(self, selector: str | int | None = None, options: DeviceOptions | None = None):
        self.options = options or DeviceOptions.from_environment()
        self._open(*choose_backend(selector, self.options.backend))
        unusable = self.info.matrices and not self.capabilities.matrix
        if unusable and (self.options.backend or AUTO) == AUTO:  # they were the reason to take this backend
            webgpu = backend(WGPU)
            self._open(webgpu, *choose(selector, webgpu))

    def _open(self, webgpu: Backend, info: DeviceInfo, adapter: Any) -> None:
        self.webgpu, self.info = webgpu, info
        features = [
            f
            for f in ("timestamp-query", "timestamp-query-inside-passes", "shader-f16", MAPPABLE)
            if f in self.info.features
        ]
        if self.options.subgroups and SUBGROUP in self.info.features and self.info.vendor_id != INTEL:
            # Intel's compiler chooses 8, 16 or 32 lanes per shader, so kernels cannot be specialised for one size.
            features.append(SUBGROUP)
            if "shader-int64" in self.info.features:  # only tilings with subgroups use 64-bit loads
                features.append("shader-int64")
        own = {name: adapter.limits[name] for name in WEBGPU_LIMITS}
        limits = WEBGPU_LIMITS if self.options.default_limits else own
        with end_signal_delayed():  # cffi discards what is raised inside wgpu's callback, which then never resolves
            self.raw = self.webgpu.open(adapter, features, limits, self.options.checked)
        self.features = frozenset(features)
        self.max_binding = int(self.raw.limits["max-storage-buffer-binding-size"]) & ~255
        self.max_buffer = int(self.raw.limits["max-buffer-size"]) & ~255
        self.allocated = self.host_allocated = 0
        self.peak_allocated = 0
        self.queued_seconds = 0.0
        self._pipelines: dict[tuple[Any, ...], Any] = {}
        self.live: WeakSet[Any] = WeakSet()
        self.before_free: Callable[[Any], None] | None = None
        self.verdicts: Any = None  # see gpu.verdicts; kept here so that they go with the device
        self.capabilities = Capabilities(
            subgroup_size=self._subgroup_size() if SUBGROUP in features else 0,
            f16="shader-f16" in features,
            int64="shader-int64" in features,
            workgroup_bytes=int(self.raw.limits["max-compute-workgroup-storage-size"]),
            threads=min(int(self.raw.limits[name]) for name in THREAD_LIMITS),
            software=self.info.kind == "software",
            matrix=self._matrix() if {SUBGROUP, "shader-f16"} <= set(features) else None,
            registers=128 if "Apple" in self.info.name else 256,  # Metal and Honeykrisp say no vendor of their own
        )

    # -- buffers ---------------------------------------------------------------------------------------------------

    def create_buffer(self, nbytes: int, label: str = "") -> Any:
        """A zeroed storage buffer of `nbytes` (rounded up to 4). Raises OutOfDeviceMemory or DeviceLost."""
        buffer = self._buffer(nbytes, label, self.webgpu.api.BufferUsage.UNIFORM)
        self.allocated += buffer.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return buffer

    def create_host_buffer(self, nbytes: int, label: str = "") -> Any:
        """A zeroed storage buffer in the host's memory, which kernels read and write through the bus.

        A buffer that can be mapped for reading is one: wgpu allocates it from the memory that the host caches.

        Raises:
            UserError: the device has no such buffers. OutOfDeviceMemory, DeviceLost: as for `create_buffer`.
        """
        self.check_host_buffers()
        buffer = self._buffer(nbytes, label, self.webgpu.api.BufferUsage.MAP_READ)
        self.host_allocated += buffer.size
        return buffer

    def check_host_buffers(self) -> None:
        """Raises UserError if `create_host_buffer` is not possible."""
        if MAPPABLE not in self.features:
            raise UserError(
                f"{self.info.name} ({self.info.backend}) cannot use buffers in the host's memory, because it does not "
                f"offer the feature {MAPPABLE}: leave out {flag('offload_activations')}."
            )

    def _buffer(self, nbytes: int, label: str, use: int) -> Any:
        size, uses = max(4, (nbytes + 3) & ~3), self.webgpu.api.BufferUsage
        usage = uses.STORAGE | uses.COPY_SRC | uses.COPY_DST | use
        try:
            with raise_device_lost(self.info.name):
                buffer = self.raw.create_buffer(label=label, size=size, usage=usage)
        except (MemoryError, self.webgpu.api.GPUError) as error:
            raise OutOfDeviceMemory(label or "a buffer", size, self.allocated) from error
        self.live.add(buffer)
        return buffer

    def free(self, buffer: Any) -> None:
        self.allocated -= buffer.size
        self._destroy(buffer)

    def free_host(self, buffer: Any) -> None:
        self.host_allocated -= buffer.size
        self._destroy(buffer)

    def _destroy(self, buffer: Any) -> None:
        if self.before_free:
            self.before_free(buffer)
        self.live.discard(buffer)
        buffer.destroy()

    def write(self, buffer: Any, data: np.ndarray, offset: int = 0) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for start in range(0, flat.nbytes, WRITE_CHUNK):
            chunk = flat[start : start + WRITE_CHUNK]
            if chunk.nbytes % 4:
                chunk = np.concatenate([chunk, np.zeros(-chunk.nbytes % 4, np.uint8)])
            with raise_device_lost(self.info.name):
                self.raw.queue.write_buffer(buffer, offset + start, chunk)
            if flat.nbytes > WRITE_CHUNK:
                self.wait()

    def read(self, buffer: Any, nbytes: int | None = None, offset: int = 0) -> np.ndarray:
        """Copies bytes to the host as uint8, after all submitted work has finished. Raises DeviceLost."""
        size = buffer.size - offset if nbytes is None else nbytes
        with raise_device_lost(self.info.name):
            data = self.raw.queue.read_buffer(buffer, offset, (size + 3) & ~3)
        self.queued_seconds = 0.0
        return np.frombuffer(data, np.uint8)[:size]

    def wait(self) -> None:
        """Blocks until the queue is empty. Raises DeviceLost."""
        self.queued_seconds = 0.0
        with raise_device_lost(self.info.name):
            self.webgpu.wait(self.raw)

    # -- shaders ---------------------------------------------------------------------------------------------------

    def compute_pipeline(self, key: tuple[Any, ...], source: Callable[[], str]) -> Any:
        """The compute pipeline of a WGSL source, compiled once per key. Raises ShaderError."""
        result = self._pipelines.get(key)
        if result is None:
            check_stop()
            label, text = str(key[0]), source()
            try:
                with raise_device_lost(self.info.name):
                    compute = {
                        "module": self.webgpu.module(self.raw, text, label, self.options.checked),
                        "entry_point": "main",
                    }
                    result = self.raw.create_compute_pipeline(label=label, layout="auto", compute=compute)
                    result.bind_layout = result.get_bind_group_layout(0)
            except self.webgpu.api.GPUError as error:
                raise ShaderError(label, str(error)) from error
            self._pipelines[key] = result
        return result

    def _matrix(self) -> MatrixConfiguration | None:
        """The product of f16 matrices that the device computes right, with sums in f32 or, if it has none, in f16."""
        usable = [matrix for matrix in self.info.matrices if matrix.inputs == "f16" and matrix.sums in ("f32", "f16")]
        unit = min(usable, key=lambda matrix: matrix.sums == "f16", default=None)
        if unit is None or self.options.subgroup_size is not None:
            return unit
        try:
            why = "" if self._multiplies_right(unit) else "their products are wrong"
        except ShaderError as error:
            why = error.reason
        if why:
            warnings.warn(f"The matrix units of {self.info.name} are not used: {why}.", DeviceWarning, stacklevel=3)
        return None if why else unit

    def _multiplies_right(self, unit: MatrixConfiguration) -> bool:
        """Whether twice a product of small integers, as the family `matrix` computes, is exact. Raises ShaderError."""
        m, n, k = unit.m, unit.n, unit.k
        constants = {"M": m, "N": n, "K": k, "LANES": unit.lanes}
        front = "".join(f"const {name} = {value}u;\n" for name, value in constants.items())
        text = f"{front}alias Sum = {unit.sums};\n{MATRIX_PROBE}"
        rng = np.random.default_rng(0)
        left, right = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (n, k))
        halves = np.concatenate([left.reshape(-1), right.reshape(-1)]).astype(np.float16)
        pipeline = self.compute_pipeline(("matrix probe", unit), partial(str, text))
        a, y = (self.create_buffer(size, "matrix probe") for size in (halves.nbytes, 4 * m * n))
        try:
            self.write(a, halves.view(np.uint32))
            self.run(pipeline, [(a, 0, a.size), (y, 0, y.size)])
            return np.array_equal(self.read(y).view(np.float32), (2 * left @ right.T).reshape(-1))
        finally:
            self.free(a)
            self.free(y)

    def _subgroup_size(self) -> int:
        """The largest workgroup that is a single subgroup, measured because drivers only report a range."""
        if self.options.subgroup_size is not None:
            return self.options.subgroup_size
        buffer = self.create_buffer(65 * 4, "subgroup probe")
        try:
            for size in (64, 32, 16, 8, 4):
                code = PROBE.replace("WG", str(size))
                try:
                    pipeline = self.compute_pipeline(("subgroup_probe", size), partial(str, code))
                except ShaderError:  # a driver without subgroups, whatever it says
                    continue
                self.run(pipeline, [(buffer, 0, buffer.size)])
                sizes = self.read(buffer).view(np.uint32)
                if sizes[0] >= size and np.array_equal(sizes[1 : 1 + size], np.arange(size)):
                    return size
        finally:
            self.free(buffer)
        return 0

    def run(self, pipeline: Any, parts: list[tuple[Any, int, int]]) -> None:
        """Submits one workgroup of a compute pipeline."""
        group, encoder = self.bind_group(pipeline, parts), self.raw.create_command_encoder()
        compute_pass = encoder.begin_compute_pass()
        compute_pass.set_pipeline(pipeline)
        compute_pass.set_bind_group(0, group)
        compute_pass.dispatch_workgroups(1)
        compute_pass.end()
        self.raw.queue.submit([encoder.finish()])

    def bind_group(self, pipeline: Any, parts: list[tuple[Any, int, int]]) -> Any:
        """Binds (buffer, offset, size) triples in order."""
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": offset, "size": size}}
            for i, (buffer, offset, size) in enumerate(parts)
        ]
        with raise_device_lost(self.info.name):
            return self.raw.create_bind_group(layout=pipeline.bind_layout, entries=entries)
