"""Programs recorded for a brick: the ops of training on synthetic tensors, with some of their dispatches timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from wgpu_lora.bench.brick import Context, Extra, Workload
from wgpu_lora.bench.reference_check import ReferenceErrors, check, fill_with_nan
from wgpu_lora.bench.timing import Timings
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.gpu.timer import clock_of
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.ops.recorder import Recorder

Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


class KeptProgram(Program):
    """A program whose temporaries have buffers of their own, which other programs can read."""

    def __init__(self, device: Device, name: str, temps: list[Tensor]):
        super().__init__(device, name)
        self._temps = temps

    def temp(self, shape: tuple[int, ...], dtype: str = "f32", name: str = "temp") -> Tensor:
        result = persistent(shape, dtype, "workspace", name)
        self._temps.append(result)
        return result


class ProgramWorkload(Workload):
    """Inputs, a forward and a backward program that a brick records with `rec`, timed by the device's clock.

    The forward program is timed, unless `time` selects dispatches of both. Both run once, in turn, before.

    Attributes:
        fillers: called with a generator before each check, to fill inputs.
    """

    def __init__(self, context: Context, compute_dtype: str = "f32"):
        self._context, self.device = context, context.device
        self.clock, self.keys = clock_of(self.device), {}
        self.temps: list[Tensor] = []
        self.forward, self.backward = (self._program(name) for name in ("forward", "backward"))
        self.rec = Recorder(self.forward, training=True, compute_dtype=compute_dtype)
        self.fillers: list[Callable[[np.random.Generator], None]] = []
        self._timed, self._baseline = self.forward, self._program("baseline")
        self._baseline_seconds: list[tuple[float, float]] = []  # and the share that is added, of each run
        self._arena = Arena(self.device)

    def _program(self, name: str) -> Program:
        return KeptProgram(self.device, name, self.temps)

    # -- recording -------------------------------------------------------------------------------------------------

    def input(
        self, shape: tuple[int, ...], fill: Fill | np.ndarray = normal, dtype: str = "f32", name: str = "input"
    ) -> Tensor:
        """A tensor that is filled before each check."""
        return self.adopt(persistent(shape, dtype, "workspace", name), fill)

    def adopt(self, tensor: Tensor, fill: Fill | np.ndarray = normal) -> Tensor:
        """Fill a tensor that is declared elsewhere before each check, if a program uses it."""

        def filler(rng: np.random.Generator) -> None:
            if tensor.storage.buffer is not None:
                values = fill if isinstance(fill, np.ndarray) else fill(rng, tensor.shape)
                values = values.astype(ml_dtypes.bfloat16 if tensor.dtype == "bf16" else NUMPY[tensor.dtype])
                self.device.write(tensor.storage.buffer, values)

        self.fillers.append(filler)
        return tensor

    def tracked(self, shape: tuple[int, ...], name: str = "x") -> Tensor:
        """An input whose gradient is computed."""
        tensor = self.input(shape, name=name)
        self.rec.node(lambda: None, inputs=[], outputs=[tensor], trains=True)
        return tensor

    def record_backward(self, y: Tensor) -> None:
        """Record the backward pass of everything so far, from a random gradient of y, into `backward`."""
        self.rec.program = self.backward
        gradient = self.rec.new_gradient(y)
        self.temps.remove(gradient)
        self.adopt(gradient)
        self.rec.backward()

    def record_again(self, record: Callable[[Recorder], Tensor], x: Tensor) -> list[Program]:
        """Record another forward and backward pass over x, to compare with; returns both programs, which do not run."""
        programs = [self._program(name) for name in ("forward", "backward")]
        rec = Recorder(programs[0], training=True, compute_dtype=self.rec.compute_dtype)
        rec.node(lambda: None, inputs=[], outputs=[x], trains=True)
        y = record(rec)
        rec.program = programs[1]
        rec.new_gradient(y)
        rec.backward()
        return programs

    def time(
        self, programs: Iterable[Program], matches: Callable[[Kernel], bool], baseline: Iterable[Program] = ()
    ) -> None:
        """Time only the dispatches of chosen kernels; `added_share` is how much more they take than `baseline`'s."""
        self._timed = self._program("timed")
        for into, recorded in ((self._timed, programs), (self._baseline, baseline)):
            into.dispatches += [step for program in recorded for step in program.dispatches if matches(step.kernel)]
        self.compares = bool(self._baseline.dispatches)

    # -- on the device ---------------------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        return [program for program in (self._timed, self._baseline) if program.dispatches]

    def _recorded(self) -> list[Program]:
        return list(dict.fromkeys((self.forward, self.backward, *self.programs())))

    def _storages(self) -> set[Storage]:
        return set().union(*(program.persistent_storages() for program in self._recorded()))

    def _arena_sizes(self) -> list[int]:
        return Arena.sizes_for([program.plan() for program in self._recorded()])

    def nbytes(self) -> int:
        for storage in (storages := self._storages()):
            if storage.nbytes > self.device.max_binding:
                raise BindingTooLarge(storage.name, storage.nbytes, self.device.max_binding)
        return missing_bytes(storages) + sum(self._arena_sizes())

    def open(self, choices: Choices = NO_CHOICES) -> None:
        allocate(self.device, self._storages())
        self._arena = Arena(self.device, self._arena_sizes())
        for program in self._recorded():
            program.build(self._arena, choices)

    def fresh(self, rng: np.random.Generator) -> None:
        """Fill the inputs with new values, and everything that kernels write with NaN."""
        for buffer in (*self._arena.buffers, *(t.storage.buffer for t in self.temps)):
            if buffer is not None:
                fill_with_nan(self.device, buffer)
        for filler in self.fillers:
            filler(rng)

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        self.fresh(rng)
        result, kernels = (
            ReferenceErrors(),
            {step.kernel.name for program in self.programs() for step in program.dispatches},
        )
        for program in (self.forward, self.backward):
            check(program, result, kernels)
        return result

    def run(self) -> float:
        if not self._baseline.dispatches:
            return self._context.timer.run(self._timed)
        baseline, seconds = (self._context.timer.run(program) for program in (self._baseline, self._timed))
        self._baseline_seconds.append((baseline, seconds / baseline - 1))
        return seconds

    def extra(self, timings: Timings) -> Extra:
        if not self._baseline.dispatches:
            return {}
        baseline, share = np.median(self._baseline_seconds[-timings.iterations :], axis=0)
        return {"frozen_seconds": float(baseline), "added_share": float(share)}

    def close(self) -> None:
        self._arena.free()
        release(self.device, self._storages())
