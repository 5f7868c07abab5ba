"""A program is a list of dispatches on fixed shapes: recorded once, planned exactly, replayed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.gpu.arena_plan import ArenaPlan, plan_arenas
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import MAX_GROUPS, GridTooLarge, ShaderError, raise_device_lost
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.first_run import run_checked, unchecked
from wgpu_lora.gpu.kernel import Grid, Kernel
from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Storage, Tensor
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.processes.signals import check_stop

SUBMIT_SECONDS = 0.4  # of work per submit, so that watchdogs do not fire and Ctrl-C is prompt
SLOW_SUBMIT = 2.5 * SUBMIT_SECONDS  # a submit that takes longer than this is divided anew
FIRST_SUBMIT, FIRST_WORK = 24, 1 << 32  # dispatches, and multiply-adds, per submit at most until they have been timed


class Program:
    """Dispatches in order. Record with `temp` and `dispatch`, then `build` once and `run` repeatedly.

    decoding: whether a row's results must not depend on how many rows there are, in any such program.
    """

    def __init__(self, device: Device, name: str = "program", decoding: bool = False):
        self.device = device
        self.name = name
        self.decoding = decoding
        self.dispatches: list[Dispatch] = []
        self._replay: list[tuple[Any, Any, Grid]] = []
        self._splits: list[int] | None = None
        self._last_seconds = 0.0  # of the last submit
        self._warm = False
        self._uniform: Storage | None = None
        self._plans: dict[bool, tuple[dict[Storage, tuple[int, int]], ArenaPlan]] = {}  # the last ones, and of what

    # -- record ----------------------------------------------------------------------------------------------------

    def temp(self, shape: tuple[int, ...], dtype: str = "f32", name: str = "temp") -> Tensor:
        """A tensor that lives in an arena from its first to its last dispatch."""
        nbytes = (math.prod(shape) * ITEM_BYTES[dtype] + 3) & ~3
        return Tensor(shape, dtype, Storage(nbytes, "activations", name, temporary=True), name=name)

    def dispatch(self, kernel: Kernel, *args: Tensor | None, tiling: Tiling | None = None, **constants: Any) -> None:
        """Appends a dispatch of `kernel`.

        Args:
            args: tensors in the order of the kernel's signature; None for optional ones that are left out.
            tiling: the tiling to use; by default, `build` chooses it.
            constants: the kernel's keyword parameters.

        Raises:
            GridTooLarge: the call needs too many workgroups.
            TypeError: arguments are missing or unknown.
        """
        names = list(kernel.bindings)
        args = args + (None,) * (len(names) - len(args))
        present = tuple(n for n, t in zip(names, args, strict=True) if t is not None)
        missing = [n for n in names if n not in present and n not in kernel.optional]
        constants = {**kernel.defaults, **constants}
        if missing or set(constants) != set(kernel.constants):
            raise TypeError(
                f"{kernel.name}: missing tensors {missing}; got the constants {sorted(constants)}, "
                f"expected {sorted(kernel.constants)}"
            )
        fixed = tiling is not None
        if tiling is None:
            capabilities = replace(self.device.capabilities, decoding=self.decoding)
            tiling = kernel.tilings(capabilities, constants)[0]
        groups = kernel.groups(constants, tiling)
        if max(groups) > MAX_GROUPS:
            raise GridTooLarge(kernel.name, groups)
        tensors = tuple(t for t in args if t is not None)
        self.dispatches.append(Dispatch(kernel, tensors, present, constants, tiling, groups, fixed, self.decoding))

    def prune(self) -> None:
        """Drops dispatches whose outputs are never read, such as the last product of a recomputed block."""
        live: set[Storage] = set()
        dispatches = []
        for step in reversed(self.dispatches):
            outputs = [t for t, n in zip(step.tensors, step.present, strict=True) if n in step.kernel.outputs]
            if any(not t.storage.temporary or t.storage in live for t in outputs):
                live.update(t.storage for t in step.tensors)
                dispatches.append(step)
        self.dispatches = dispatches[::-1]

    # -- plan ------------------------------------------------------------------------------------------------------

    def lifetimes(self) -> dict[Storage, tuple[int, int]]:
        """Indices of the first and last dispatch that use each temporary storage."""
        spans: dict[Storage, tuple[int, int]] = {}
        for index, step in enumerate(self.dispatches):
            for tensor in step.tensors:
                if tensor.storage.temporary:
                    spans[tensor.storage] = (spans.get(tensor.storage, (index, index))[0], index)
        return spans

    def plan(self, on_host: bool = False) -> ArenaPlan:
        """The locations of all temporaries in the device's memory, or of those in the host's."""
        spans = {storage: span for storage, span in self.lifetimes().items() if storage.on_host == on_host}
        if on_host not in self._plans or self._plans[on_host][0] != spans:
            self._plans[on_host] = spans, plan_arenas(spans, self.device.max_buffer, self.device.max_binding)
        return self._plans[on_host][1]

    def persistent_storages(self) -> set[Storage]:
        """All storages with buffers of their own, including the uniform dims."""
        result = {t.storage for step in self.dispatches for t in step.tensors if not t.storage.temporary}
        dims = self._dims()
        return result | ({self._dims_storage(len(dims))} if dims else set())

    def uniforms(self) -> Iterator[tuple[Storage, np.ndarray]]:
        """The storage of the uniform dims and its content, if there are any."""
        if dims := self._dims():
            table = np.zeros((len(dims), ALIGNMENT // 4), np.uint32)
            for values, row in dims.items():
                table[row, : len(values)] = values
            yield self._dims_storage(len(dims)), table

    def bindings(self) -> Iterator[tuple[Dispatch, list[tuple[Storage, int, int]]]]:
        """Each dispatch with what it binds, in order: storages, and offset and size of each binding in bytes."""
        dims = self._dims()
        for step in self.dispatches:
            parts = [(t.storage, t.byte_offset, (t.nbytes + 3) & ~3) for t in step.tensors]
            if step.kernel.dims:
                uniform = self._dims_storage(len(dims))
                parts.append((uniform, ALIGNMENT * dims[step.dims], 4 * 4 * -(-len(step.dims) // 4)))
            yield step, parts

    def _dims(self) -> dict[tuple[int, ...], int]:
        """Distinct dims of the dispatches -> index in the uniform buffer."""
        indices: dict[tuple[int, ...], int] = {}
        for step in self.dispatches:
            if step.kernel.dims:
                indices.setdefault(step.dims, len(indices))
        return indices

    def _dims_storage(self, count: int) -> Storage:
        nbytes = ALIGNMENT * count
        if self._uniform is None or self._uniform.nbytes != nbytes:
            self._uniform = Storage(nbytes, "workspace", f"dims of {self.name}")
        return self._uniform

    # -- build and replay ------------------------------------------------------------------------------------------

    def build(self, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        """Binds temporaries to the arena, compiles the compute pipelines and creates the bind groups.

        Args:
            arena: buffers at least as large as the plan's.
            choices: tilings of heavy kernels, by call (see `gpu.tuner`); other calls use the default.

        Raises:
            ShaderError: a shader does not compile in the tiling that the dispatch was recorded with.
            WrongResults: the device gets a kernel wrong, or does not compile it, in all tilings.
        """
        compiled = verdicts_of(self.device).compiled
        self.dispatches = [step if step.fixed else compiled(step, choices) for step in self.dispatches]
        for plan, buffers in ((self.plan(), arena.buffers), (self.plan(on_host=True), arena.host_buffers)):
            Arena.check(plan, buffers)
            for storage, (number, offset) in plan.locations.items():
                storage.buffer, storage.offset = buffers[number], offset
        for storage, table in self.uniforms():
            self.device.write(storage.buffer, table)
        self._bind()

    def _bind(self) -> None:
        groups = dict[tuple[Any, ...], Any]()
        self._replay = []
        for step, bound in self.bindings():
            pipeline = step.kernel.compute_pipeline(self.device, step.present, step.constants, step.tiling)
            parts = [(storage.buffer, storage.offset + offset, size) for storage, offset, size in bound]
            key = (id(pipeline), *((id(b), offset, size) for b, offset, size in parts))
            if key not in groups:
                groups[key] = self.device.bind_group(pipeline, parts)
            self._replay.append((pipeline, groups[key], step.groups))

    def retile(self, index: int, tiling: Tiling) -> None:
        """Uses another tiling in a dispatch, and in all others of its compute pipeline. Raises ShaderError."""
        before, shader = self.dispatches, self.dispatches[index].shader
        self.dispatches = [step.tiled(tiling) if step.shader == shader else step for step in before]
        try:
            self._bind()
        except ShaderError:
            self.dispatches = before
            raise

    def release(self) -> None:
        """Frees the uniform dims, the only buffer that the program allocates itself."""
        if self._uniform and self._uniform.buffer is not None:
            self.device.free(self._uniform.buffer)
            self._uniform.buffer = None

    def run(self) -> None:
        """Submits all dispatches. The first run checks kernels that have not been checked on this device; the second is
        timed piece by piece to decide where to split later ones.

        Raises:
            WrongResults: the device gets a kernel wrong in all tilings.
        """
        if not self._warm:  # the first run includes the driver's own compilation: it is not timed
            run_checked(self, unchecked(self), len(self.dispatches))
            self._warm = True
            return
        if self._splits is None:
            self._splits = self._calibrate()
            return
        for start, stop in self.submits():
            if self.device.queued_seconds > SUBMIT_SECONDS:
                self.device.wait()
            if stop == len(self._replay):
                self.submit(start, stop)
                self.device.queued_seconds += self._last_seconds
            elif self._timed(start, stop) > SLOW_SUBMIT:  # the device has become slower
                self._splits = None

    def submits(self) -> list[tuple[int, int]]:
        """[start, stop) of the dispatches in each submit. Until the program has been timed, there is one submit."""
        ends = self._splits or [len(self._replay)]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def _calibrate(self) -> list[int]:
        splits, total = [], 0.0
        for start, stop in self._pieces(0, len(self._replay)):
            elapsed = self._timed(start, stop)
            if total + elapsed > SUBMIT_SECONDS and start:
                splits.append(start)
                total = 0.0
            total += elapsed
        self._last_seconds = total
        return [*splits, len(self._replay)]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """[start, stop) in pieces that are short on any device: smaller ones after one that was not."""
        begin, work, share = start, 0.0, 1.0
        for index in range(start, stop):
            step = self.dispatches[index]
            own = step.kernel.tuning.work(step.constants) if step.kernel.tuning else 0.0
            if index > begin and (index - begin >= share * FIRST_SUBMIT or work + own > share * FIRST_WORK):
                started = time.perf_counter()
                yield begin, index
                share = min(1.0, share * SUBMIT_SECONDS / max(time.perf_counter() - started, 1e-9))
                begin, work = index, 0.0
            work += own
        if begin < stop:
            yield begin, stop

    def submit_in_pieces(self, start: int, stop: int) -> None:
        """Submits the dispatches [start, stop) before it is known how long they take, and waits for them."""
        for piece in self._pieces(start, stop):
            self._timed(*piece)

    def _timed(self, start: int, stop: int) -> float:
        """Submits the dispatches [start, stop) and waits for them; returns the seconds."""
        begin = time.perf_counter()
        self.submit(start, stop)
        self.device.wait()
        return time.perf_counter() - begin

    def submit(self, start: int, stop: int, timestamps: dict[str, Any] | None = None) -> None:
        """Submits the dispatches [start, stop) as one compute pass, which may write timestamps. Raises DeviceLost,
        and Stopped if this work is to stop."""
        check_stop()
        with raise_device_lost(self.device.info.name):
            encoder = self.device.raw.create_command_encoder()
            compute = encoder.begin_compute_pass(timestamp_writes=timestamps)
            set_pipeline, set_bind_group = compute.set_pipeline, compute.set_bind_group
            dispatch, current = compute.dispatch_workgroups, None
            for pipeline, group, (x, y, z) in self._replay[start:stop]:
                if pipeline is not current:
                    set_pipeline(pipeline)
                    current = pipeline
                set_bind_group(0, group)
                dispatch(x, y, z)
            compute.end()
            self.device.raw.queue.submit([encoder.finish()])


class Arena:
    """Buffers for temporaries, shared by programs that never run at the same time and sized for the largest.

    Args:
        sizes, host_sizes: bytes of the buffers in the device's memory, and in the host's.
    """

    def __init__(self, device: Device, sizes: Sequence[int] = (), host_sizes: Sequence[int] = ()):
        self.device = device
        self.buffers = [device.create_buffer(size, "activations") for size in sizes]
        self.host_buffers = [device.create_host_buffer(size, "offloaded activations") for size in host_sizes]

    @staticmethod
    def check(plan: ArenaPlan, buffers: Sequence[Any]) -> None:
        assert len(plan.sizes) <= len(buffers), "the arena has too few buffers"
        for need, buffer in zip(plan.sizes, buffers, strict=False):
            assert need <= buffer.size, "the arena is too small"

    @staticmethod
    def sizes_for(plans: list[ArenaPlan]) -> list[int]:
        """Buffer sizes that fit each of the plans, one at a time."""
        count = max((len(p.sizes) for p in plans), default=0)
        return [max(p.sizes[i] for p in plans if i < len(p.sizes)) for i in range(count)]

    def free(self) -> None:
        for buffer in self.buffers:
            self.device.free(buffer)
        for buffer in self.host_buffers:
            self.device.free_host(buffer)
        self.buffers, self.host_buffers = [], []


def allocate(device: Device, storages: set[Storage]) -> None:
    """Creates the missing buffers of persistent storages, largest first. Raises OutOfDeviceMemory."""
    for storage in sorted(storages, key=lambda s: (-s.nbytes, s.name)):
        if storage.buffer is None:
            storage.buffer = device.create_buffer(storage.nbytes, storage.name)


def release(device: Device, storages: Iterable[Storage]) -> None:
    """Frees the buffers of persistent storages."""
    for storage in storages:
        if storage.buffer is not None:
            device.free(storage.buffer)
            storage.buffer = None


def missing_bytes(storages: Iterable[Storage]) -> int:
    """Bytes that `allocate` would allocate."""
    return sum(storage.nbytes for storage in storages if storage.buffer is None)
